"""Keep random projections of some entries of many tensors.

Two runs of a block are compared by all of its results. Copies of a thousand entries of each took megabytes, which no plan counted.
A projection on random numbers of unit variance has on average the size of what it projects (Johnson and Lindenstrauss, 1984), so
that a few projections tell how large a difference is.
"""

import functools
import math

import torch
from torch import Tensor

__all__ = ["Projections"]

_ENTRIES = 1 << 10  # entries of each tensor, or up to twice as many: enough to find a difference
_NUMBERS = 16  # projections of each tensor: their norm is right within a fifth or so
_ROWS = 16  # tensors whose projections share one piece of memory, since a GPU's allocator gives 512 bytes at least


class Projections:
    """The projections of tensors, in the order in which they were added.

    Attributes:
        shapes: Shape of each tensor.
    """

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []
        self._rows: list[Tensor] = []  # (16,) each
        self._free: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def add(self, leaf: Tensor) -> None:
        """Keep the projections of a dense tensor of real or complex numbers."""
        entries = _some_entries(leaf)
        weights = _weights(entries.device, entries.dtype)
        padded = torch.zeros_like(weights)
        padded[: entries.numel()] = entries
        row = self._row(entries)
        # Entry i belongs to projection i % 16: those of a small tensor are all kept apart.
        torch.sum(padded.mul_(weights).view(-1, _NUMBERS), 0, out=row)
        self.shapes.append(leaf.shape)
        self._rows.append(row)

    def _row(self, like: Tensor) -> Tensor:
        free = self._free.setdefault((like.device, like.dtype), [])
        if not free:
            free.extend(reversed(like.new_empty(_ROWS, _NUMBERS).unbind()))
        return free.pop()

    def differences(self, others: "Projections") -> list[float]:
        """Return how much each tensor differs from its counterpart.

        That is the norm of their difference as a share of the larger norm. NaN equals NaN. The share is NaN where only one of them is NaN.

        Args:
            others: Of tensors of the same shapes.
        """
        if not self._rows:
            return []
        device = self._rows[0].device
        dtype = functools.reduce(torch.promote_types, (row.dtype for row in self._rows + others._rows))
        one, other = (
            torch.stack([row.to(device=device, dtype=dtype) for row in rows]) for rows in (self._rows, others._rows)
        )
        is_same = (one == other) | (one.isnan() & other.isnan())
        difference = torch.where(is_same, 0, one - other).norm(dim=1)
        size = torch.maximum(*(each.nan_to_num(0, 0, 0).norm(dim=1) for each in (one, other)))
        return torch.where(is_same.all(1), 0, difference / size).tolist()


def _some_entries(leaf: Tensor) -> Tensor:
    """Return fewer than 2,048 entries in one dimension.

    They are in float64 on a CPU and for tensors of that type, otherwise in float32.
    """
    values = torch.view_as_real(leaf.detach().resolve_conj()) if leaf.is_complex() else leaf.detach()
    in_memory = sorted(range(values.dim()), key=values.stride, reverse=True)  # a view of one dimension where possible
    stride = values.numel() // _ENTRIES | 1  # odd: an even stride would skip columns of a matrix of even width
    some = values.permute(in_memory).reshape(-1)[::stride]
    return some.to(torch.float64 if some.device.type == "cpu" or some.dtype is torch.float64 else torch.float32)


@functools.cache
def _weights(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return 2,048 numbers of unit variance without a pattern.

    They are the same each time, and no random generator is used.
    """
    count = torch.arange(1, 2 * _ENTRIES + 1, device=device, dtype=dtype)
    return count.square().sin() * math.sqrt(2)
