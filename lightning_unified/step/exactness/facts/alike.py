"""Count the values that rows of a batch share, such as ids and times, and find equal rows."""

import torch
from torch import Tensor

__all__ = ["FEW", "shared_values"]

FEW = 4  # entries of a row that may be ids; judgement: rows of more hold tokens or features
_AT_ONCE = 1 << 18  # entries whose bits are mixed at once
_PARTS = 32  # parts in which the bits of a large leaf are mixed; more take more kernels
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX, _MIX_AGAIN = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd numbers of splitmix64, within int64


def shared_values(stack: Tensor) -> Tensor:
    """Return how many values occur in several rows, of shape (leaves, 1).

    Rows of up to 4 entries share a value that they have at the same place. Longer rows share all entries or none, for
    which there is at most 1: how many masks or lengths are alike varies from batch to batch.

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


def _marks(bits: Tensor) -> Tensor:
    """Return a number for each row that equal rows share, of shape (leaves, rows, 1).

    It is a sum of whole numbers that wraps around, so neither the order of the additions nor the place of a row changes
    it. Large leaves are read in parts, as a batch may take most of the memory that is left.

    Args:
        bits: Integers of shape (leaves, rows, entries per row).
    """
    leaves, rows, entries = bits.shape
    wide = torch.int64 if bits.element_size() == 8 else torch.int32
    at_once = max(bits.numel() // _PARTS, _AT_ONCE)
    marks = bits.new_zeros((leaves, rows, 1), dtype=wide)
    for start in range(0, entries, at_once):
        weights = _weights(start, min(start + at_once, entries), bits.device).to(wide)
        few = max(at_once // (leaves * len(weights)), 1)
        for mark, part in zip(marks.split(few, 1), bits[:, :, start : start + at_once].split(few, 1), strict=True):
            mixed = (part.to(wide) >> 16).bitwise_xor_(part)  # the bits of whole numbers as floats end in many zeros
            mark.add_(mixed.mul_(weights).sum(2, keepdim=True, dtype=wide))
    return marks


def _weights(start: int, stop: int, device: torch.device) -> Tensor:
    """Return odd numbers without order for entries of a row, from `start` to before `stop`."""
    numbers = torch.arange(start + 1, stop + 1, device=device) * _MIX
    return ((numbers ^ (numbers >> 29)) * _MIX_AGAIN) >> 31 | 1
