"""A call of an operation, as a repair reads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["BACK", "RESULT", "Call", "Kept", "Order", "Repair", "byte_count"]

RESULT, BACK = -1, -2


@dataclass(frozen=True, slots=True)
class Call:
    """One call, fake or real.

    Attributes:
        args: In the order of the operation's schema, defaults filled in.
        results: Those of its results that are tensors.
    """

    args: Sequence[Any]
    results: Sequence[Tensor]


Order = tuple[int, ...]
"""What happens to memory in a call: bytes of a block that is taken (0 for none), `BACK` where the latest of them is given back, `RESULT` where
the next result is taken. Results that are not named come first, blocks that are not given back end with the call."""

Repair = Callable[[Call], int | Order]
Kept = Callable[[Call], int]


def byte_count(tensor: Tensor) -> int:
    """Return the bytes of a tensor's entries."""
    return tensor.numel() * tensor.element_size()
