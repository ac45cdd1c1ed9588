"""Replace torch's attention, under every loaded name, by attention in chunks."""

import logging
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from lightning_unified.nn.attention.function import TORCHS, attention_or_none
from lightning_unified.nn.module_tree.walks import modules_of

__all__ = ["ChunkedAttention", "attends_by_itself"]

log = logging.getLogger("lightning_unified")

# modules that keep torch's function: this package, and torch's own table, in which modes and tensor subclasses look it up
_LEFT = (__name__.rpartition(".")[0], "torch._C")
_active: list["ChunkedAttention"] = []


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Compute attention in chunks in training, and as torch does otherwise."""
    if not _active:
        return TORCHS(*args, **kwargs)  # a copy of the name that was made meanwhile
    result = attention_or_none(*args, **kwargs)
    if result is None:
        return TORCHS(*args, **kwargs)
    _active[-1].calls += 1
    return result


# an object that holds the function is then pickled with the name of torch's
scaled_dot_product_attention.__module__ = "torch.nn.functional"


class ChunkedAttention:
    """Replace torch's attention by attention in chunks of queries, until `remove`.

    These references are replaced: names in loaded modules, entries of their dictionaries (registries of transformers included), and
    attributes of the modules inside `module`. Names that are made while it is active are restored too.

    Attributes:
        calls: Number of calls that were computed in chunks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        self._module: nn.Module | None = module
        _active.append(self)
        _replace(TORCHS, scaled_dot_product_attention, module)

    def remove(self) -> None:
        """Restore torch's function, unless another module still replaces it.

        A second call does nothing.
        """
        module, self._module = self._module, None
        if module is None:
            return
        _active.remove(self)
        if not _active:
            _replace(scaled_dot_product_attention, TORCHS, module)


def attends_by_itself(module: nn.Module) -> list[str]:
    """Return the modules that compute attention weights themselves; chunks do not reach them.

    These are models of transformers with `attn_implementation="eager"`, and `nn.MultiheadAttention`, which returns its weights unless it is
    called with `need_weights=False`. Torch's own transformer layers call it so.
    """
    found: list[str] = []
    quiet = {
        id(child)
        for layer in modules_of(module)
        if isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
        for child in layer.children()
    }
    eager: tuple[str, ...] = ()
    for name, child in module.named_modules():
        config = getattr(child, "config", None)
        if getattr(config, "_attn_implementation", None) == "eager":
            if not any(name.startswith(outer) for outer in eager):
                found.append(f'{name or type(child).__name__} (attn_implementation="eager")')
                eager = (*eager, f"{name}." if name else "")
        elif isinstance(child, nn.MultiheadAttention) and id(child) not in quiet:
            found.append(f"{name} (nn.MultiheadAttention, unless need_weights=False)")
    return found


def _replace(before: Any, after: Any, module: nn.Module) -> None:
    """Replace a function in all loaded modules, in their dictionaries, and in `module`.

    Attributes of `module` and of its submodules are replaced.
    """
    registry = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", dict)
    holders, entered = {dict, registry}, set[int]()  # many modules share one dictionary: that of the builtins
    for loaded, each in list(sys.modules.items()):
        names = getattr(each, "__dict__", None)
        if not isinstance(names, dict) or loaded.startswith(_LEFT):
            continue
        for name, value in [
            (name, value) for name, value in names.items() if value is before or type(value) in holders
        ]:
            if value is before:
                names[name] = after
            elif id(value) not in entered:
                entered.add(id(value))
                for holder in [value] if type(value) is dict else _mappings_of(value):
                    _replace_in(holder, before, after)
    for child in modules_of(module):
        _replace_in(vars(child), before, after)


def _replace_in(holder: MutableMapping[str, Any], before: Any, after: Any) -> None:
    for name in [name for name, value in holder.items() if value is before]:
        holder[name] = after


def _mappings_of(interface: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield the entries of an attention registry of transformers, and those of its class."""
    yield from (vars(interface)[slot] for slot in ("_local_mapping",) if slot in vars(interface))
    yield from (getattr(type(interface), slot) for slot in ("_global_mapping",) if hasattr(type(interface), slot))
