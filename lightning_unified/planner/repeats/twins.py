"""Find the twins among a module's blocks: equal structure, and equal events in a whole step."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from torch import nn

from lightning_unified.nn.autograd_limits import has_hooks
from lightning_unified.nn.compiled import is_compiled
from lightning_unified.nn.module_tree.blocks import find_blocks
from lightning_unified.nn.recomputing import is_recomputed
from lightning_unified.planner.fake.storages import Storage
from lightning_unified.planner.fake.value_shapes import READS
from lightning_unified.planner.repeats.expansion import Births, Raw, Segment, UnlikeError, normal, segments_of
from lightning_unified.planner.repeats.marks import Span

__all__ = ["Run", "Section", "Twins", "blocks_of", "state_of"]

_TRACED = 4  # blocks of a run that are always traced: the first three and the last
_READS = frozenset(map(str, READS)) | {"aten.index.Tensor"}
_PLAIN = (int, float, str, type(None))
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive blocks that run alike; the first and the last may differ.

    Attributes:
        first, end: The first block, and the one after the last.
        gradients: The names of the parameters whose gradients the backward pass allocates, in that order.
        passes: Whether the gradient of the output becomes that of the input, so that the backward pass allocates none.
        works: The operations of a block's forward pass, with their places in the block; None before the first trace of a run that was found
            under another attention.
        touched: The names of the weights and buffers whose storages a forward pass is the first to use, in that order; None if that is not
            known, or differs between the blocks. Then the first step on a fake copy runs all blocks.
    """

    first: int
    end: int
    gradients: tuple[str, ...]
    passes: bool
    works: tuple[tuple[str, str], ...] | None
    touched: tuple[str, ...] | None = None

    def sections(self, recomputed: Sequence[bool]) -> list["Section"]:
        """Return the parts of the run whose blocks all recompute, or do not.

        `recomputed` tells for each block of the module whether it does.
        """
        alike = groupby(range(self.first, self.end), key=recomputed.__getitem__)
        bounds = [(one[0], one[-1] + 1) for one in (list(blocks) for _, blocks in alike)]
        return [Section(run=self, first=first, end=end) for first, end in bounds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Consecutive blocks of a run that are called alike in a step; the first and the last may differ.

    Attributes:
        run: The run.
        first, end: The first block, and the one after the last.
    """

    run: Run
    first: int
    end: int

    @property
    def twins(self) -> tuple[int, int]:
        """The block whose events are copied, and the one whose events must equal them."""
        return self.first + 1, self.first + 2

    @property
    def skipped(self) -> range:
        """The blocks that need not run."""
        return range(self.first + 3, self.end - 1)


class Twins:
    """The runs of equal blocks of a module at one precision, found once for all its fake copies.

    Attributes:
        runs: The runs; None before a step was learnt from.
    """

    def __init__(self) -> None:
        self.runs: list[Run] | None = None
        self._is_borrowed = self._has_failed = False

    def borrow(self, other: "Twins", blocks: Sequence[nn.Module]) -> None:
        """Try the runs that were found under another attention.

        Nothing is tried if the runs of this one are known, or have failed before.

        Attention sees the layout of its tensors, which are equal in all blocks of a run, and plain settings such as a window. Blocks with other
        settings are no twins here, although they may have been so under the other attention.
        """
        if self.runs is not None or self._has_failed or not other.runs:
            return
        runs = [run for run in other.runs if _have_equal_settings(blocks[run.first + 1 : run.end - 1])]
        if runs == other.runs:
            self.runs, self._is_borrowed = [replace(run, works=None) for run in runs], True

    def compare_works(self, first: int, works: tuple[tuple[str, str], ...]) -> None:
        """Compare a block's operations with those of its run, which begins at `first`.

        If those of the run are unknown, they are these.

        Raises:
            UnlikeError: If they differ.
        """
        for at, run in enumerate(runs := self.runs or []):
            if run.first == first and run.works is None:
                runs[at] = replace(run, works=works)
            elif run.first == first and run.works != works:
                raise UnlikeError("a block runs other operations than when it was learnt")

    def borrowed(self) -> "Twins":
        """Return the same runs for a step on another batch, which replaces those that do not hold."""
        twins = Twins()
        twins.runs = None if self.runs is None else list(self.runs)
        twins._is_borrowed = bool(self.runs)
        return twins

    def give_up(self) -> None:
        """Trace all blocks from now on; runs that were borrowed are learnt anew first."""
        self.runs, self._is_borrowed, self._has_failed = None if self._is_borrowed else [], False, True

    def sections(self, blocks: Sequence[nn.Module]) -> list[Section]:
        """Return the parts of the runs whose blocks recompute alike now."""
        recomputed = [is_recomputed(block) for block in blocks]
        return [section for run in self.runs or () for section in run.sections(recomputed)]

    def learn(
        self,
        raw: Sequence[Raw],
        blocks: Mapping[str, nn.Module],
        *,
        changed: set[int],
        weights: Sequence[Mapping[int, str]] | None = None,
    ) -> None:
        """Find the runs in the recording of a step in which all blocks ran.

        Args:
            raw: The recording.
            blocks: The blocks by their names.
            changed: The blocks whose call changed state.
            weights: For each block, the names of its weights and buffers by the numbers of their storages, if the step is the first to use
                them.
        """
        names, self.runs = list(blocks), []
        try:
            segments = segments_of(raw)
        except UnlikeError:
            return
        births = Births(segments)
        for first, end in _alike(list(blocks.values())):
            if changed.isdisjoint(range(first, end)):
                run = _run(first, end, segments, births, names)
                if run is not None and weights is not None:
                    run = replace(run, touched=_touched(run, segments, weights))
                self.runs += [] if run is None else [run]


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a module whose parameters are all their own; empty if it has none."""
    try:
        found = find_blocks(module)
    except ValueError:
        return {}
    often = Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))
    own = all(often[id(one)] == 1 for block in found.modules.values() for one in block.parameters())
    return found.modules if own and not found.checkpointed else {}


def state_of(block: nn.Module) -> list[Any]:
    """Return the state that a block's call may change.

    It consists of attributes, buffers and Python's random state.
    """
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    found: list[Any] = [hash(random.getstate()), kind, keys.tobytes(), *rest]  # pyright: ignore[reportAttributeAccessIssue]
    for child in block.modules():
        for name, value in vars(child).items():
            size = len(value) if isinstance(value, (list, dict, set)) else None
            found.append((name, id(value), size))
        found += [(id(one), one._version) for one in child._buffers.values() if one is not None]
    return found


def _run(first: int, end: int, segments: Mapping[Span, Segment], births: Births, names: Sequence[str]) -> Run | None:
    """Return the run from `first` to `end`; None if inner blocks differ or read values."""
    forward, backward = (
        [segments.get((direction, 0, block)) for block in range(first + 1, end - 1)]
        for direction in ("forward", "backward")
    )
    known = [segment for segment in (*forward, *backward) if segment is not None]
    if len(known) < 2 * (end - first - 2):
        return None
    try:
        kinds = [normal(segment, births, names) for segment in known]
    except UnlikeError:
        return None
    count = len(forward)
    if any(kind != kinds[0] for kind in kinds[:count]) or any(kind != kinds[count] for kind in kinds[count:]):
        return None
    works, mark = known[0].works(names[first + 1]), known[count].mark
    orders = {tuple(segment.mark.gradients) for segment in known[count:]}
    if len(orders) > 1 or any(op in _READS for segment in (known[0], known[count]) for op, _ in segment.works("")):
        return None
    return Run(first=first, end=end, gradients=tuple(mark.gradients), passes=mark.result is None, works=tuple(works))


def _touched(
    run: Run, segments: Mapping[Span, Segment], weights: Sequence[Mapping[int, str]]
) -> tuple[str, ...] | None:
    """Return the names of the weights that each block's forward pass is the first to use.

    The result is None if the blocks differ.
    """
    orders = {
        tuple(
            weights[block][event.number]
            for event in segments["forward", 0, block].events
            if isinstance(event, Storage) and event.number in weights[block]
        )
        for block in range(run.first + 1, run.end - 1)
    }
    return orders.pop() if len(orders) == 1 else None


def _alike(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Return start and end of each run of equal structure that is long enough to skip blocks."""
    kinds = [_structure(block) for block in blocks]
    found, first = [], 0
    for at in range(1, len(kinds) + 1):
        if at == len(kinds) or kinds[at] is None or kinds[at] != kinds[first]:
            if kinds[first] is not None and at - first > _TRACED:
                found.append((first, at))
            first = at
    return found


def _structure(block: nn.Module) -> Any:
    """Return the classes and parameters of a block; None if hooks see its calls or gradients."""
    found: list[Any] = []
    for name, child in block.named_modules():
        if is_compiled(child) or any(getattr(child, hooks, None) for hooks in _HOOKS):
            return None
        found.append((name, type(child), child.training))
        for tensors in (child._parameters, child._buffers):
            for key, one in tensors.items():
                if one is not None and has_hooks(one):
                    return None
                found.append((key, None if one is None else (one.shape, one.stride(), one.dtype, one.requires_grad)))
    return found


def _have_equal_settings(blocks: Sequence[nn.Module]) -> bool:
    """Return whether each plain attribute is the same in all blocks, or different in each.

    The number of a block is different in each.
    """
    for alike in zip(*(block.modules() for block in blocks), strict=True):
        for name in {name for child in alike for name in vars(child)}:
            values = [vars(child).get(name) for child in alike]
            if all(isinstance(value, _PLAIN) for value in values) and len(set(values)) not in (1, len(values)):
                return False
    return True
