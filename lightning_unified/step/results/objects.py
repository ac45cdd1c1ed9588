"""Read objects by their attributes, and make objects of merged attributes.

A step may keep an object that it makes: `self.posterior = Normal(mean, scale)`, `self.state = State(hidden, cell)`.
"""

import copy
import enum
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from lightning_unified.step.split.containers import PLAIN, entries_of, is_list_of_plain
from lightning_unified.step.undo.cells import Cell, cells_of
from lightning_unified.step.undo.kinds import Kind, kind_of

__all__ = ["attributes_of", "holds_values", "layers_of", "with_attributes"]

_MOST = 1000  # values in an object that is read by its attributes
_VALUES = (
    *PLAIN,
    Tensor,
    np.ndarray,
    np.generic,
    nn.Module,
    enum.Enum,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.distributions.Transform,
)


def attributes_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the (name, value) pairs of an object's attributes; None for anything else.

    None also for an object with more than its attributes, such as a table of another library or one that holds itself.
    """
    return _attributes(value) if _is_object(value) and holds_values(value) else None


def with_attributes(like: Any, attributes: dict[str, Any]) -> Any:
    """Return a copy of the object `like` that has `attributes`."""
    made = copy.copy(like)
    for cell in _cells(made):
        for name in cell.copy():
            cell.put(name, attributes[name])
    return made


def holds_values(value: Any) -> bool:
    """Return whether a container or an object holds only values, in others of these kinds too, and few of them."""
    waiting: list[tuple[Any, tuple[int, ...]]] = [(value, ())]
    for _ in range(_MOST):
        if not waiting:
            return True
        one, holders = waiting.pop()
        if isinstance(one, _VALUES) or is_list_of_plain(one):
            continue
        entries = _attributes(one) if _is_object(one) else entries_of(one)
        if entries is None or id(one) in holders:
            return False
        waiting += [(entry, (*holders, id(one))) for _, entry in entries]
    return False


def layers_of(value: Any) -> list[nn.Module]:
    """Return the layers with weights that a value is, or that a list, tuple or dict holds."""
    if isinstance(value, nn.Module):
        return [value] if next(value.parameters(), None) is not None else []
    entries = entries_of(value) if isinstance(value, (list, tuple, dict)) and not is_list_of_plain(value) else None
    return [layer for _, entry in entries or () for layer in layers_of(entry)]


def _is_object(value: Any) -> bool:
    return kind_of(type(value)) is Kind.OBJECT or isinstance(value, Distribution)


def _cells(value: Any) -> list[Cell]:
    return cells_of(value, Kind.OBJECT, (None, "", "global"))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    return [pair for cell in _cells(value) for pair in cell.copy().items()]
