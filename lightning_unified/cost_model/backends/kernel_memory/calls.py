"""A call of an operation, and the order in which it allocates and frees memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["BACK", "FLOAT", "HALF", "RESULT", "Call", "Kept", "Order", "Repair", "byte_count", "rounded_up"]

RESULT, BACK = -1, -2
HALF = (torch.float16, torch.bfloat16)
FLOAT = 4  # bytes of a float32 entry


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
"""Memory events of a call, in order.

A number is the bytes of a block that the call takes (0 for none). `BACK` frees the latest block; `RESULT` takes the next result.
Results without an entry come first; blocks without a `BACK` end with the call.
"""

Repair = Callable[[Call], int | Order]
Kept = Callable[[Call], int]


def byte_count(tensor: Tensor) -> int:
    """Return the bytes of a tensor's entries."""
    return tensor.numel() * tensor.element_size()


def rounded_up(count: int, multiple: int) -> int:
    """Return the least multiple that is not below `count`."""
    return -(-count // multiple) * multiple
