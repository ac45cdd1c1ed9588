"""Figures of a batch's tensors: numbers that determine its facts, from few operators.

A fact needs numbers on the host. Copying them from the device waits until the device has finished all earlier work, and then the device
waits for the host. So the figures of small tensors are computed on the host before the batch is moved (`HostFigures`), where the moved
tensor is certain to have the same values.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.exactness.facts.alike import shared_values
from lightning_unified.step.exactness.facts.fields import named_tensors

__all__ = ["IGNORED", "KINDS", "HostFigures", "figures_of", "ignored_in_rows", "size_and_sign_of"]

KINDS = 64  # range of integers within which each value is a fact; a power of two
IGNORED = -100  # the label that torch's cross_entropy ignores by default (torch/nn/functional.py, `ignore_index`)
_MOST_ON_HOST = 1 << 18  # entries of a tensor; more take the host longer than a wait for the device

# entries of a leaf from which on a copy, or a table of the values that occur, would take too much memory
_LARGE = 1 << 20
_AT_ONCE = 1 << 22  # entries that are counted at once: torch casts a mask to int64 before it sums it
_REDUCED = {torch.bool: torch.uint8, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


class HostFigures:
    """The figures of tensors of one batch, computed before they were moved to the device.

    A small batch is kept on the host too, until the next one, so that loss terms of its micro-batches can be counted there.

    Attributes:
        is_wanted: Whether the next `note` computes anything. It does for the first batch, and then after each batch that is split.
        ignored: The labels that count as ignored.
    """

    def __init__(self) -> None:
        self.is_wanted = True
        self.ignored: frozenset[int] = frozenset({IGNORED})
        self._found: dict[int, tuple[weakref.ref[Tensor], int, list[int]]] = {}
        self._host: Any = None
        self._host_versions: list[tuple[Tensor, int]] = []

    def note(self, host: Any, moved: Any) -> None:
        """Compute figures of a batch's tensors on the host; `moved` is the batch on the device."""
        self._found.clear()
        self._host, self._host_versions = None, []
        if not self.is_wanted:
            return
        self.is_wanted = False
        before, after = dict(named_tensors(host)), dict(named_tensors(moved))
        if list(before) != list(after):
            return
        pairs = [(before[path], after[path]) for path in before if _is_moved(before[path], after[path])]
        for (_, leaf), figures in zip(pairs, figures_of([one for one, _ in pairs], self), strict=True):
            self._found[id(leaf)] = (weakref.ref(leaf), leaf._version, figures)
        if pairs and len(pairs) == len(before):
            self._host, self._host_versions = host, [(one, one._version) for one, _ in pairs]

    def of(self, leaf: Tensor) -> list[int] | None:
        """Return the figures of a moved tensor; None if unknown or if the tensor was written since."""
        reference, version, figures = self._found.get(id(leaf), (None, None, None))
        return figures if reference is not None and reference() is leaf and leaf._version == version else None

    def batch_on_host(self, moved: Any) -> Any:
        """Return a moved batch as it is on the host.

        The result is None if it is not kept, or if a tensor of either was written since.
        """
        known = [self.of(leaf) is not None for _, leaf in named_tensors(moved)]
        is_same = len(known) == len(self._found) and all(known)
        return self._host if is_same and all(one._version == was for one, was in self._host_versions) else None


def _is_moved(before: Tensor, after: Tensor) -> bool:
    small = before.dim() > 0 and 0 < before.numel() <= _MOST_ON_HOST and before.layout == torch.strided
    same = before is not after and before.shape == after.shape and before.dtype == after.dtype
    return small and same and not before.is_complex() and before.device.type == "cpu"


def figures_of(leaves: Sequence[Tensor], known: HostFigures | None = None) -> list[list[int]]:
    """Return the figures of tensors that have an entry per row and are not empty.

    `_float_figures` and `_integer_figures` list them.
    """
    ignored = frozenset({IGNORED}) if known is None else known.ignored
    found = [None if known is None else known.of(leaf) for leaf in leaves]
    groups: dict[Any, list[int]] = {}  # small leaves of one shape are stacked, which takes fewer kernels
    for index, leaf in enumerate(leaves):
        if found[index] is None:
            own = index if leaf.numel() > _LARGE else None
            groups.setdefault((leaf.device, leaf.dtype, len(leaf), leaf.numel(), own), []).append(index)
    stacks = []
    for indices in groups.values():
        flat = [leaves[index].detach().reshape(len(leaves[index]), -1) for index in indices]
        stacks.append(torch.stack(flat) if len(flat) > 1 else flat[0][None])
    figures = [_float_figures(one) if one.is_floating_point() else _integer_figures(one, ignored) for one in stacks]
    for indices, numbers in zip(groups.values(), _on_host(figures), strict=True):
        for index, own in zip(indices, numbers, strict=True):
            found[index] = own
    return [one for one in found if one is not None]


def _on_host(figures: Sequence[Tensor]) -> list[list[list[int]]]:
    """Return the figures as numbers, with one transfer if all lie on one device."""
    if not figures:
        return []
    devices = {one.device for one in figures}
    if len(devices) > 1:
        return [one.tolist() for one in figures]
    numbers = iter(torch.cat([one.reshape(-1) for one in figures]).tolist())
    return [[list(islice(numbers, one.shape[1])) for _ in range(len(one))] for one in figures]


# Each operator costs a launch per batch, and each of its kernels some milliseconds when a GPU first loads it. So figures of rows are
# put together before they are reduced, and all integers are reduced as int64.


def _float_figures(stack: Tensor) -> Tensor:
    """Return figures of shape (leaves, 9): zeros, non-finite entries, shared values, size, sign.

    The numbers of the first two have their sum, minimum and maximum over rows. Then follow how many values rows share, the order of magnitude
    of the largest finite entry, as `_orders` has it, and whether there are negative entries.

    Args:
        stack: Leaves of floating-point numbers, of shape (leaves, rows, entries per row).
    """
    zeros = _counted(stack, lambda part: _wide(part) == 0)
    size_and_sign = size_and_sign_of(stack.flatten(1))
    of_rows = _over_rows(zeros, _counted(stack, lambda part: ~_wide(part).isfinite()))
    return torch.cat([of_rows, shared_values(stack), size_and_sign], 1)


def _wide(part: Tensor) -> Tensor:
    """Return floating-point numbers in a format that operators support: few support those of 8 bits."""
    return part.detach().float() if part.element_size() == 1 else part.detach()


def size_and_sign_of(flat: Tensor) -> Tensor:
    """Return the order of magnitude of the largest finite size, and whether there are negative entries.

    Args:
        flat: Floating-point numbers of shape (leaves or rows, entries).

    Returns:
        Integers of shape (leaves or rows, 2).
    """
    low, high = _finite_limits(flat)
    return torch.stack([_orders(torch.maximum(high, -low)), (low < 0).long()], 1)


def _finite_limits(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest of 0 and the finite entries, for each entry of the first dimension.

    Large tensors are read in halves.
    """
    if flat.numel() <= _AT_ONCE or flat.shape[1] == 1:
        part = _wide(flat)
        finite = torch.where(part.isfinite(), part, 0)
        return finite.amin(1).clamp(max=0), finite.amax(1).clamp(min=0)
    (low, high), (other_low, other_high) = (_finite_limits(half) for half in flat.tensor_split(2, 1))
    return torch.minimum(low, other_low), torch.maximum(high, other_high)


def _orders(sizes: Tensor) -> Tensor:
    """Return the orders of magnitude of sizes, in steps of 8 whose ends are 0.7 and 5.7.

    So the largest of many uniform, and of many normal numbers, is of one order in almost every batch.
    """
    # in float32, because MPS has no float64
    return torch.floor((torch.log2(sizes.float().clamp(1e-30, 1e30)) + 0.5) / 3).long()


def _integer_figures(stack: Tensor, ignored_labels: Collection[int] = (IGNORED,)) -> Tensor:
    """Return figures of shape (leaves, 12 + 64) of values and rows.

    They are the lowest and highest value, how many values rows share, figures of rows, and the values that occur modulo 64.

    The figures of rows are sum, minimum and maximum over rows of the numbers of zeros and of ignored entries, and of whether the row repeats
    a number at an end. The last 64 figures are left out for leaves of more than 2^20 entries.

    Args:
        stack: Leaves of integers or booleans, of shape (leaves, rows, entries per row).
        ignored_labels: The values of ignored entries.
    """
    whole = stack.to(_REDUCED.get(stack.dtype, stack.dtype))
    flat = whole.flatten(1)
    limits = torch.stack([flat.amin(1), flat.amax(1)], 1).long()
    zeros = _counted(whole, lambda part: part == 0)
    ignored = ignored_in_rows(whole, ignored_labels)
    second = min(1, whole.shape[2] - 1)
    repeats = (whole[:, :, 0] == whole[:, :, second]) | (whole[:, :, -1] == whole[:, :, -1 - second])
    figures = torch.cat([limits, shared_values(whole), _over_rows(zeros, ignored, repeats.long())], 1)
    if flat.shape[1] > _LARGE:
        return figures
    occurs = figures.new_zeros(len(stack), KINDS).scatter_(1, (flat & (KINDS - 1)).long(), 1)
    return torch.cat([figures, occurs], 1)


def ignored_in_rows(stack: Tensor, labels: Collection[int]) -> Tensor:
    """Return how many entries of each row are labels that losses ignore, of shape (leaves, rows).

    Args:
        stack: Leaves of integers or booleans, of shape (leaves, rows, entries per row).
        labels: The ignored labels. Those that the dtype of `stack` cannot hold occur nowhere.
    """
    whole = stack.to(_REDUCED.get(stack.dtype, stack.dtype))
    limits, counts = torch.iinfo(whole.dtype), torch.zeros(stack.shape[:2], dtype=torch.long, device=stack.device)
    for label in labels:
        if limits.min <= label <= limits.max:
            counts += _counted(whole, partial(torch.eq, other=label))
    return counts


def _counted(stack: Tensor, mask: Callable[[Tensor], Tensor]) -> Tensor:
    """Return how many entries of each row `mask` marks, of shape (leaves, rows).

    Large stacks are counted in halves.
    """
    _, rows, entries = stack.shape
    if stack.numel() <= _AT_ONCE or rows == entries == 1:
        return mask(stack).sum(2)
    first, second = (_counted(half, mask) for half in stack.tensor_split(2, 1 if rows > 1 else 2))
    return torch.cat([first, second], 1) if rows > 1 else first + second


def _over_rows(*figures: Tensor) -> Tensor:
    """Return sums, then minima, then maxima over rows of `figures` of shape (leaves, rows)."""
    together = torch.stack(figures, 1)
    return torch.cat([together.sum(2), together.amin(2), together.amax(2)], 1)
