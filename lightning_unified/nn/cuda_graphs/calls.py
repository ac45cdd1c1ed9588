"""The arguments of one call of a network, and their key."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "call_of"]

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of one call of a network.

    Attributes:
        key: Shapes, dtypes, autocast and constants; calls with equal keys share one recording.
        form: The key without the number of rows, the first size of each tensor.
        values: Positional arguments, then keyword arguments.
        names: Names of the keyword arguments.
        autocast: Whether autocast is on, and its dtype.
    """

    key: Hashable
    form: Hashable
    values: tuple[Any, ...]
    names: tuple[str, ...]
    autocast: tuple[bool, torch.dtype]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the values."""
        return [value for value in self.values if isinstance(value, Tensor)]

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(one.numel() for one in self.tensors)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments."""
        first = len(self.values) - len(self.names)
        return self.values[:first], dict(zip(self.names, self.values[first:], strict=True))

    def example(self) -> "Call":
        """Return a copy with its own tensors, from which a recording reads."""
        own = (
            value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in self.values
        )
        return replace(self, values=tuple(own))


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any], *, device: torch.device) -> Call | None:
    """Return the call, or None if it cannot be recorded.

    A call needs at least one tensor. Its arguments must be plain tensors on `device`, or constants.
    """
    values = (*args, *kwargs.values())
    kinds: list[Any] = []
    for value in values:
        if type(value) is Tensor and value.device == device:
            kinds.append((value.shape, value.dtype, value.requires_grad))
        elif type(value) in _CONSTANTS:
            kinds.append((type(value), value))
        else:
            return None
    if not any(isinstance(value, Tensor) for value in values):
        return None
    names = tuple(kwargs)
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    forms = [(kind[0][1:], *kind[1:]) if isinstance(kind[0], torch.Size) else kind for kind in kinds]
    key, form = ((names, tuple(found), autocast) for found in (kinds, forms))
    return Call(key=key, form=form, values=values, names=names, autocast=autocast)
