"""Count the values that rows of a batch share, such as ids and times, and find equal rows."""

import torch
from torch import Tensor

__all__ = ["FEW", "shared_values"]

FEW = 4  # entries of a row that may be ids; judgement: rows of more hold tokens or features
_AT_ONCE = 1 << 22  # entries whose bits are mixed at once
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX, _MIX_AGAIN = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd numbers of splitmix64, within int64


def shared_values(stack: Tensor) -> Tensor:
    """Return how many values occur in several rows, of shape (leaves, 1).

    Rows of up to 4 entries share a value that they have at the same place. Longer rows share all entries or none, for which there is at most 1: how
    many masks or lengths are alike varies from batch to batch.

    Args:
        stack: Leaves of real numbers, of shape (leaves, rows, entries per row).
    """
    bits = stack.detach().view(_BITS[stack.element_size()]) if stack.is_floating_point() else stack
    is_long = stack.shape[2] > FEW
    ordered = (_marks(bits) if is_long else bits).sort(1).values
    is_again = ordered[:, 1:] == ordered[:, :-1]
    is_first = is_again.clone()
    is_first[:, 1:] &= ~is_again[:, :-1]
    numbers = is_first.flatten(1).sum(1, keepdim=True)
    return numbers.clamp(max=1) if is_long else numbers


def _marks(bits: Tensor, start: int = 0) -> Tensor:
    """Return a number for each row that equal rows share, of shape (leaves, rows, 1).

    It is a sum of whole numbers that wraps around, so neither the order of the additions nor the place of a row changes it.

    Args:
        bits: Integers of shape (leaves, rows, entries per row).
        start: The place of the first entry in its row.
    """
    _, rows, entries = bits.shape
    if bits.numel() > _AT_ONCE and (rows > 1 or entries > 1):
        first, second = bits.tensor_split(2, 1 if rows > 1 else 2)
        if rows > 1:
            return torch.cat([_marks(first, start), _marks(second, start)], 1)
        return _marks(first, start) + _marks(second, start + first.shape[2])
    weights = torch.arange(start + 1, start + 1 + entries, device=bits.device) * _MIX
    weights = (weights ^ (weights >> 29)) * _MIX_AGAIN
    mixed = (bits.long() + 1) * weights
    return (mixed ^ (mixed >> 31)).sum(2, keepdim=True)
