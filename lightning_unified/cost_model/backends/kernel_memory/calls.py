"""A call of an operation, and the order in which it allocates and frees memory."""

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
        args: Arguments in the order of the operation's schema, defaults filled in.
        results: Results that are tensors.
    """

    args: Sequence[Any]
    results: Sequence[Tensor]


Order = tuple[int, ...]
"""Memory events of a call: bytes of a block that is taken (0 for none), `BACK` where the latest block is given back, `RESULT` where
the next result is taken. Results without an entry come first; blocks without a `BACK` end with the call."""

Repair = Callable[[Call], int | Order]
Kept = Callable[[Call], int]


def byte_count(tensor: Tensor) -> int:
    """Return the bytes of a tensor's entries."""
    return tensor.numel() * tensor.element_size()
