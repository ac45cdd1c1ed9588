"""Record the state that a step may change, and restore it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import Metric

from lightning_unified.errors import RunError
from lightning_unified.step.undo.cells import Cell, ClosureCell, LongCell, NamesCell, Path, SlotsCell, path_text
from lightning_unified.step.undo.kinds import Kind
from lightning_unified.step.undo.roots import Roots
from lightning_unified.step.undo.states import iterator_copied, set_state, state_of
from lightning_unified.step.undo.still import StillCells, holds
from lightning_unified.step.undo.tensors import NotedTensors, TensorKeeper
from lightning_unified.step.undo.walk import Found, FoundTensor, Walk

__all__ = ["Noted", "StateWatch"]

_ALWAYS = (NamesCell, ClosureCell, SlotsCell, LongCell)  # few, and copied before every step
_SMALL_ARRAY = 1 << 16  # bytes


class StateWatch:
    """Notes the state that a step may change, from the same roots before every step.

    A first scan finds all of it. What holds only things that a step rarely exchanges (most modules' attributes) is copied once, and
    before a step it is only made sure that it still holds the same objects. What changed once, and what holds tensors, is copied
    before every step from then on, with all that it leads to.

    Args:
        roots: Gives the roots; called at every scan.
        tensors: Whether tensors are noted by value. If not, only which tensors are where is put back.
    """

    def __init__(self, roots: Callable[[], Roots], *, tensors: bool = True) -> None:
        self._roots = roots
        self._tensors = TensorKeeper() if tensors else None
        self._still: StillCells | None = None
        self._found = Found()
        self._changing: dict[int, Any] = {}
        self._modules: dict[int, nn.Module] = {}
        self._known: set[int] = set()
        self._trained: set[int] = set()
        self._metrics: dict[str, Metric] = {}

    @property
    def metrics(self) -> list[Metric]:
        """The torchmetrics objects with a state, wherever they are held, as of the last note."""
        return list(self.named_metrics.values())

    @property
    def named_metrics(self) -> dict[str, Metric]:
        """The same, by where each was found."""
        return {path: metric for path, metric in self._metrics.items() if metric._defaults}

    def note(self) -> "Noted":
        """Record the state as it is now; earlier records become invalid."""
        still = self._looked_at()
        changing = self._of_changing()
        if changing.modules:  # that were not there before
            still = self._scan()
            changing = self._of_changing()
        tensors = [*changing.tensors, *_tensors_of(changing), *_tensors_of(self._found)]
        noted = None if self._tensors is None else self._tensors.note(self._found.tensors, tensors)
        return Noted(still, self._found, changing, noted, metric_paths=self._metrics.keys())

    def look(self) -> None:
        """Find the state without recording it."""
        self._looked_at()
        if self._of_changing().modules:
            self._scan()

    def learn(self, noted: "Noted") -> None:
        """After a step that went well: remember which large tensors it changed.

        Args:
            noted: Before the step.
        """
        if self._tensors is not None and noted.tensors is not None:
            self._tensors.learn(noted.tensors)

    def release(self) -> None:
        """Drop the copies of tensors, where nothing that was noted is to be put back any more."""
        if self._tensors is not None:
            self._tensors.release()

    def forget(self) -> None:
        """Drop what was found, so that nothing is kept alive that the module gives back; the next note looks at everything."""
        self._still, self._found, self._known, self._modules = None, Found(), set(), {}

    def _looked_at(self) -> StillCells:
        if self._still is not None:
            if self._still.are_same():
                return self._still
            self._changing.update((id(cell.target), cell.target) for cell in self._still.changed())
        return self._scan()

    def _of_changing(self) -> Found:
        return Walk(trained=self._trained, known=self._known).cells(self._found.deferred).found

    def _scan(self) -> StillCells:
        """Walk through everything, and tell apart what is copied once and what is copied before every step."""
        roots = self._roots()
        self._trained, self._modules = roots.trained, {}
        self._metrics = {}
        walk = Walk(trained=self._trained, defers=self._is_copied_always).cells(roots.cells)
        met = [*((module, (None, name, "global")) for module, name in roots.modules), *walk.found.modules]
        while met:
            module, path = met.pop()
            walk.found.modules.clear()
            if id(module) not in self._modules:
                self._modules[id(module)] = module
                if isinstance(module, Metric):
                    self._metrics[path_text(path)] = module
                walk.module(module, path)
            met += walk.found.modules
            if not met:  # modules that only changing things lead to
                others = Walk(trained=self._trained, known=walk.seen).cells(walk.found.deferred).found.modules
                met += [one for one in others if id(one[0]) not in self._modules]
        self._found, self._known = walk.found, walk.seen | self._modules.keys()
        owned = (vars(module).get(name) for module in self._modules.values() for name in _DICTS)
        empty = [entries for entries in owned if entries is not None and not entries]
        self._still = StillCells(self._found.cells, empty=empty, counted=roots.parameters)
        return self._still

    def _is_copied_always(self, cell: Cell, entries: Sequence[tuple[Any, Any, Kind]]) -> bool:
        return (
            isinstance(cell, _ALWAYS)
            or id(cell.target) in self._changing
            or any(
                kind in (Kind.ARRAY, Kind.ITERATOR) or (kind is Kind.TENSOR and not isinstance(value, nn.Parameter))
                for _, value, kind in entries
            )
        )


class Noted:
    """The state before a step.

    Args:
        still: What has not changed since it was scanned.
        scanned: What the scan found in it.
        changing: What is found before every step.
        tensors: The tensors' values; None where they are not noted.
        metric_paths: Where torchmetrics objects are.
    """

    def __init__(
        self,
        still: StillCells,
        scanned: Found,
        changing: Found,
        tensors: NotedTensors | None,
        *,
        metric_paths: Collection[str] = (),
    ) -> None:
        self.tensors, self.metric_paths = tensors, metric_paths
        self._still, self._cells = still, changing.cells
        self._states = [(value, state_of(value), path) for value, path in (*scanned.states, *changing.states)]
        self._iterators = [(cell, name, iterator_copied(value)) for cell, name, value in changing.iterators]
        small = (one for one in (*scanned.arrays, *changing.arrays) if one[0].nbytes <= _SMALL_ARRAY)
        self._arrays = [(array, array.copy(), path) for array, path, _ in small]

    @property
    def states(self) -> list[tuple[Any, Any, Path]]:
        """Generators and the like, each with its state and where it was found."""
        return self._states

    @property
    def arrays(self) -> list[tuple[Any, Any, Path]]:
        """Small NumPy arrays, each with a copy and where it was found."""
        return self._arrays

    def moved_cells(self) -> Iterator[tuple[Cell, Any]]:
        """Yield the cells that do not hold the very objects they held, each with what it held."""
        if not self._still.are_same():
            yield from self._still.moved()
        for cell, contents in self._cells:
            if not holds(cell.copy(), contents):
                yield cell, contents

    def restore(self) -> None:
        """Put everything back; may be called again.

        Raises:
            RunError: If something changed that cannot be put back; all else has been put back then.
        """
        self._still.restore()
        errors: list[RunError] = []
        for cell, contents in self._cells:
            try:
                cell.restore(contents)
            except RunError as error:
                errors.append(error)
        for cell, name, iterator in self._iterators:
            cell.put(name, iterator_copied(iterator))
        for value, state, _ in self._states:
            set_state(value, state)
        for array, entries, _ in self._arrays:
            if array.flags.writeable:
                array[...] = entries
        if self.tensors is not None:
            self.tensors.restore()
        if errors:
            raise errors[0]


_DICTS = ("_modules", "_parameters", "_buffers")


def _tensors_of(found: Found) -> list[FoundTensor]:
    """Return tensors that share the memory of large arrays."""
    tensors: list[FoundTensor] = []
    for array, path, slot in found.arrays:
        if array.nbytes > _SMALL_ARRAY and array.flags.writeable and array.dtype.kind in "biuf":
            try:
                tensors.append(FoundTensor(torch.from_numpy(np.asarray(array)), path, slot))
            except (TypeError, ValueError):  # of a dtype that torch does not have, or of strides below zero
                continue
    return tensors
