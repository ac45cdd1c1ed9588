"""A call of an operation, as a repair reads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Call", "Kept", "Repair", "byte_count"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call, fake or real.

    Attributes:
        args: In the order of the operation's schema, defaults filled in.
        results: Those of its results that are tensors.
    """

    args: Sequence[Any]
    results: Sequence[Tensor]


Repair = Callable[[Call], int | tuple[int, ...]]
Kept = Callable[[Call], int]


def byte_count(tensor: Tensor) -> int:
    """Return the bytes of a tensor's entries."""
    return tensor.numel() * tensor.element_size()
