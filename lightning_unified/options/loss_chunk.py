"""The loss chunk: the number of rows of logits that exist at one time."""

from typing import Any, Literal

import lightning as L

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.lazy_logits import LazyHeads, obstacles, output_heads, rows_of, tied_heads

__all__ = ["AskedChunk", "LossChunk", "check_chunk", "chunk_choices", "chunk_of", "offers_chunk"]

AskedChunk = int | Literal["auto", False]

_ATTRIBUTE = "loss_chunk_rows"
_CHOICES = (4096, 2048, 1024, 128)


class LossChunk:
    """The loss chunk of a module, from construction until `undo`.

    There are two ways, and the loss depends on the chunk in neither of them, beyond rounding.

    A class of its own kind declares an attribute `loss_chunk_rows`, an int or None (its own choice). Its `training_step` passes the
    attribute to the loss function; `lightning_unified.nn.linear_cross_entropy` takes it as `chunk_rows`.

    Any other module with output heads needs nothing: they return logits without storage in training, and `cross_entropy` computes them
    in chunks (`lightning_unified.nn.lazy_logits`).

    Logits and their gradient take rows x vocabulary x 8 bytes in float32.

    Args:
        rows: Rows of logits that exist at one time; None leaves the number to the module.

    Attributes:
        rows: As given.
        how: The output heads, for people: `": network.lm_head"`; empty for a module with the attribute.

    Raises:
        ConfigurationError: If the module offers neither, or `rows` is not a count.
    """

    def __init__(self, module: L.LightningModule, rows: int | None) -> None:
        has_attribute = _has_attribute(module)
        if not has_attribute and not _has_heads(module):
            raise ConfigurationError(
                f"loss_chunk={rows}: {type(module).__name__} has no attribute {_ATTRIBUTE}, by which a class says that its loss can be "
                "computed in chunks, and no output head (a linear layer, or an embedding table after a normalization, with at least 2,048 "
                "classes and twice as many as features). Give the class the attribute, and pass it to "
                "lightning_unified.nn.linear_cross_entropy as chunk_rows."
            )
        if rows is not None and not _is_count(rows):
            raise ConfigurationError(f"loss_chunk={rows!r}: give a count of rows, 1 or more, or None.")
        self._module: L.LightningModule | None = module if has_attribute else None
        self._before: int | None = getattr(module, _ATTRIBUTE) if has_attribute else None
        self._own = _ATTRIBUTE in vars(module)
        self._heads: LazyHeads | None = None
        self.rows, self.how = rows, ""
        if has_attribute:
            setattr(module, _ATTRIBUTE, rows)
        elif rows is not None:
            self._heads = LazyHeads(module, rows)
            left = [f"not {name}, because {why}" for name, why in self._heads.refused.items()]
            self.how = f": {'; '.join([*self._heads.names, *left])}"

    def undo(self) -> None:
        """Restore the module; a second call does nothing."""
        heads, self._heads = self._heads, None
        if heads is not None:
            heads.remove()
        module, self._module = self._module, None
        if module is None:
            return
        if _ATTRIBUTE in vars(module) and not self._own:
            delattr(module, _ATTRIBUTE)
        else:
            setattr(module, _ATTRIBUTE, self._before)


def offers_chunk(module: L.LightningModule) -> bool:
    """Return whether the module has a loss chunk that can be set."""
    heads = {**output_heads(module), **tied_heads(module)}
    return _has_attribute(module) or len(heads) > len(obstacles(module))


def chunk_choices(module: L.LightningModule, asked: AskedChunk = "auto") -> tuple[int | None, ...]:
    """Return the chunk sizes a plan may compare.

    There is a single one if the user or the module has set it. None is the module as it is.
    """
    if asked is not False and _is_count(asked):
        return (asked,)  # pyright: ignore[reportReturnType]
    if asked is False or not offers_chunk(module):
        return (None,)
    own = chunk_of(module)
    return (None, *_CHOICES) if own is None else (own,)


def chunk_of(module: L.LightningModule) -> int | None:
    """Return the loss chunk that is set on the module; None if there is none."""
    return getattr(module, _ATTRIBUTE) if _has_attribute(module) else rows_of(module)


def check_chunk(asked: Any) -> None:
    """Raise `ConfigurationError` if `asked` is neither `"auto"`, nor False, nor a count of rows."""
    if asked != "auto" and asked is not False and not _is_count(asked):
        raise ConfigurationError(f'loss_chunk={asked!r}: give "auto", false, or a count of rows of logits, 1 or more.')


def _has_heads(module: L.LightningModule) -> bool:
    return bool(output_heads(module) or tied_heads(module))


def _has_attribute(module: L.LightningModule) -> bool:
    """Return whether the module's class declares the attribute, with None or a count.

    An attribute that only the object has, or of another type, is the user's own and is neither read nor set.
    """
    if not hasattr(type(module), _ATTRIBUTE):
        return False
    value = getattr(module, _ATTRIBUTE)
    return value is None or _is_count(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
