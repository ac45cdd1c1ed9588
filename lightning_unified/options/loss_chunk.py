"""The loss chunk: the number of rows of logits that exist at one time."""

import lightning as L

from lightning_unified.errors import ConfigurationError

__all__ = ["LossChunk", "chunk_choices", "offers_chunk"]

_ATTRIBUTE = "loss_chunk_rows"
_CHOICES = (8192, 1024, 128)


class LossChunk:
    """The loss chunk of a module, from construction until `undo`.

    A module offers it by an attribute `loss_chunk_rows`, an int or None (its own choice). Its `training_step` passes the attribute to the
    loss function; `lightning_unified.nn.linear_cross_entropy` takes it as `chunk_rows`. The loss must not depend on it beyond rounding.
    Logits and their gradient take rows x vocabulary x 8 bytes in float32.

    Args:
        rows: Rows of logits that exist at one time; None leaves the number to the module.

    Raises:
        ConfigurationError: If the module does not offer it, or `rows` is not a count.
    """

    def __init__(self, module: L.LightningModule, rows: int | None) -> None:
        if not offers_chunk(module):
            raise ConfigurationError(
                f"loss_chunk={rows}: {type(module).__name__} has no attribute {_ATTRIBUTE}, by which a module says that its loss can be "
                "computed in chunks. Give it one, and pass it to lightning_unified.nn.linear_cross_entropy as chunk_rows."
            )
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ConfigurationError(f"loss_chunk={rows!r}: give a count of rows, 1 or more, or None.")
        self._module: L.LightningModule | None = module
        self._before: int | None = getattr(module, _ATTRIBUTE)
        self._own = _ATTRIBUTE in vars(module)
        self.rows = rows
        setattr(module, _ATTRIBUTE, rows)

    def undo(self) -> None:
        """Restore the module; a second call does nothing."""
        module, self._module = self._module, None
        if module is None:
            return
        if _ATTRIBUTE in vars(module) and not self._own:
            delattr(module, _ATTRIBUTE)
        else:
            setattr(module, _ATTRIBUTE, self._before)


def offers_chunk(module: L.LightningModule) -> bool:
    """Return whether the module has a loss chunk that can be set."""
    return hasattr(module, _ATTRIBUTE) and not callable(getattr(module, _ATTRIBUTE))


def chunk_choices(module: L.LightningModule) -> tuple[int | None, ...]:
    """Return the chunk sizes a plan may compare; a single one if the module has set a number."""
    if not offers_chunk(module):
        return (None,)
    own = getattr(module, _ATTRIBUTE)
    return (None, *_CHOICES) if own is None else (own,)
