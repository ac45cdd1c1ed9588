"""Record the state that a step may change, and restore it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_unified.errors import UndoError
from lightning_unified.step.undo.cells import Cell, ClosureCell, LongCell, NamesCell, Path, SlotsCell, path_text
from lightning_unified.step.undo.hooks import NotedHooks
from lightning_unified.step.undo.iterators import NotedIterators, put_stand_ins
from lightning_unified.step.undo.kinds import Kind, holds_iterators
from lightning_unified.step.undo.roots import Roots
from lightning_unified.step.undo.states import set_state, state_of
from lightning_unified.step.undo.still import StillCells, holds
from lightning_unified.step.undo.tensors import NotedTensors, TensorKeeper
from lightning_unified.step.undo.torch_cells import OptimizerStateCell, ScriptCell
from lightning_unified.step.undo.walk import HOOKS, Found, FoundTensor, Walk

__all__ = ["BatchWatch", "Noted", "StateWatch"]

_ALWAYS = (
    ClosureCell,
    SlotsCell,
    LongCell,
    ScriptCell,
    OptimizerStateCell,
)  # few cells, so they are copied before every step
_SMALL_ARRAY = 1 << 16  # bytes


class StateWatch:
    """Records the state that a step may change, from the same roots before every step.

    A first scan finds all of it. Most cells, such as modules' attribute dicts, rarely change their contents. They are copied once; before
    each step the watch compares their contents by identity. Cells that changed once, and cells that hold tensors, are copied before
    every step, together with everything that they lead to.

    Args:
        roots: Returns the roots; called at every scan.
        tensors: Whether to record the values of tensors. If not, `restore` puts the same tensors back in place, not their values.
    """

    def __init__(self, roots: Callable[[], Roots], *, tensors: bool = True) -> None:
        self._roots = roots
        self._tensors = TensorKeeper() if tensors else None
        self._still: StillCells | None = None
        self._found = Found()
        self._changing: dict[int, Any] = {}
        self._modules: dict[int, tuple[nn.Module, Path]] = {}
        self._known: set[int] = set()
        self._trained: set[int] = set()
        self._named: frozenset[str] = frozenset()
        self._metrics: dict[str, Metric] = {}

    @property
    def named_metrics(self) -> dict[str, Metric]:
        """The torchmetrics objects with a state, by path, from the last note or look."""
        return {path: metric for path, metric in self._metrics.items() if metric._defaults}

    def note(self) -> "Noted":
        """Record the state as it is now; earlier records become invalid."""
        still = self._looked_at()
        changing = self._of_changing()
        if changing.modules:  # new modules since the last scan
            still = self._scan()
            changing = self._of_changing()
        replaced = put_stand_ins(changing.iterators)
        if replaced:
            changing = self._of_changing()
        tensors = [*changing.tensors, *_tensors_of(changing), *_tensors_of(self._found)]
        noted = None if self._tensors is None else self._tensors.note(self._found.tensors, tensors)
        return Noted(
            still,
            self._found,
            changing,
            noted,
            iterators=NotedIterators(changing.iterators, replaced),
            hooks=NotedHooks(self._modules.values()),
            metric_paths=self._metrics.keys(),
            leaves=_leaves_among(self._found, changing),
        )

    def look(self) -> list[Tensor]:
        """Find the state without recording it, and return the leaves, as `Noted` has them."""
        self._looked_at()
        changing = self._of_changing()
        if changing.modules:
            self._scan()
            changing = self._of_changing()
        return _leaves_among(self._found, changing)

    def learn(self, noted: "Noted") -> None:
        """Record which large tensors a successful step changed since `noted`."""
        if self._tensors is not None and noted.tensors is not None:
            self._tensors.learn(noted.tensors)

    def release(self) -> None:
        """Drop the copies of tensors; earlier records can then no longer be restored."""
        if self._tensors is not None:
            self._tensors.release()

    def forget(self) -> None:
        """Drop all that was found, so that no freed object of the module stays alive.

        The next note scans everything again.
        """
        self._still, self._found, self._known, self._modules = None, Found(), set(), {}

    def _looked_at(self) -> StillCells:
        if self._still is not None:
            if self._still.are_same():
                return self._still
            self._changing.update((id(cell.target), cell.target) for cell, _ in self._still.moved())
        return self._scan()

    def _of_changing(self) -> Found:
        walk = Walk(trained=self._trained, known=self._known, named=self._named)
        return walk.cells(self._found.deferred).found

    def _scan(self) -> StillCells:
        """Walk through everything, and find the cells that are copied before every step.

        All other cells are copied once.
        """
        roots = self._roots()
        self._trained, self._named, self._modules = roots.trained, roots.named, {}
        self._changing.update((id(one), one) for one in roots.changing)
        self._metrics = {}
        walk = Walk(trained=self._trained, named=self._named, defers=self._is_copied_always).cells(roots.cells)
        met = [*walk.found.modules, *((module, (None, name, "global")) for module, name in roots.modules)]
        while met:
            module, path = met.pop()
            walk.found.modules.clear()
            if id(module) not in self._modules:
                self._modules[id(module)] = (module, path)
                if isinstance(module, Metric):
                    self._metrics[path_text(path)] = module
                walk.module(module, path)
            met += walk.found.modules
            if not met:  # modules that are reachable only from cells copied before every step
                others = Walk(trained=self._trained, known=walk.seen, named=self._named)
                others = others.cells(walk.found.deferred).found.modules
                met += [one for one in others if id(one[0]) not in self._modules]
        self._found, self._known = walk.found, walk.seen | self._modules.keys()
        owned = (vars(module).get(name) for module, _ in self._modules.values() for name in _DICTS)
        empty = [entries for entries in owned if isinstance(entries, dict) and not entries]
        hooks = [vars(module)[name] for module, _ in self._modules.values() for name in HOOKS if name in vars(module)]
        empty += [one for one in hooks if not one]
        counted = [*roots.parameters, *filter(None, hooks)]
        self._still = StillCells(self._found.cells, empty=empty, counted=counted)
        return self._still

    def _is_copied_always(self, cell: Cell, entries: Sequence[tuple[Any, Any, Kind]]) -> bool:
        return (
            isinstance(cell, _ALWAYS)
            or (isinstance(cell, NamesCell) and cell.lacks_names)
            or id(cell.target) in self._changing
            or any(
                kind in (Kind.ARRAY, Kind.ITERATOR)
                or (kind is Kind.TUPLE and holds_iterators(value))
                or (kind is Kind.TENSOR and not isinstance(value, nn.Parameter))
                for _, value, kind in entries
            )
        )


class Noted:
    """The recorded state from before a step.

    Args:
        still: Cells that were copied at the scan and have not changed since.
        scanned: The values with a state, and the arrays, that the scan found.
        changing: The cells and values that are recorded before every step.
        tensors: The tensors' values; None where they are not recorded.
        iterators: Iterators, as `iterators` keeps them.
        hooks: The hooks of modules, as `hooks` keeps them.
        metric_paths: Paths of torchmetrics objects.
        leaves: The tensors that a backward pass may give gradients, besides the optimizers' parameters: unfrozen parameters that no
            optimizer of the Trainer has, and tensors in attributes.

    Attributes:
        states: Generators and other values with a state, each with its state and path.
        arrays: Small NumPy arrays, each with a copy and its path.
    """

    def __init__(
        self,
        still: StillCells,
        scanned: Found,
        changing: Found,
        tensors: NotedTensors | None,
        *,
        iterators: NotedIterators,
        hooks: NotedHooks,
        metric_paths: Collection[str] = (),
        leaves: Sequence[Tensor] = (),
    ) -> None:
        self.tensors, self.metric_paths, self.leaves = tensors, metric_paths, leaves
        self._still, self._cells = still, changing.cells
        self.states = [(value, state_of(value), path) for value, path in (*scanned.states, *changing.states)]
        self.iterators, self.hooks = iterators, hooks
        small = (one for one in (*scanned.arrays, *changing.arrays) if one[0].nbytes <= _SMALL_ARRAY)
        self.arrays = [(array, array.copy(), path) for array, path, _ in small]

    def moved_cells(self) -> Iterator[tuple[Cell, Any]]:
        """Yield the cells that hold other objects than before, each with its earlier contents."""
        if not self._still.are_same():
            yield from self._still.moved()
        for cell, contents in self._cells:
            if not holds(cell.copy(), contents):
                yield cell, contents

    def rewind_iterators(self) -> None:
        """Put iterators back at their recorded positions; may be called more than once.

        Raises:
            UndoError: If one was drawn from that cannot be put back.
        """
        for error in self.iterators.restore():
            raise error

    def restore(self) -> None:
        """Restore the recorded state; may be called more than once.

        Raises:
            UndoError: If something changed that cannot be restored; everything else has been restored by then.
        """
        self.hooks.remove()
        self._still.restore()
        errors: list[UndoError] = []
        for cell, contents in self._cells:
            try:
                cell.restore(contents)
            except UndoError as error:
                errors.append(error)
        errors += self.iterators.restore()
        for value, state, path in self.states:
            try:
                set_state(value, state)
            except UndoError as error:
                errors.append(
                    UndoError(
                        f"a step that is undone had changed {path_text(path)}, {error}, so the step cannot be repeated exactly."
                    )
                )
        for array, entries, _ in self.arrays:
            if array.flags.writeable:
                array[...] = entries
        if self.tensors is not None:
            self.tensors.restore()
        if errors:
            raise errors[0]


class BatchWatch:
    """The containers, objects and tensors of a batch, restored for another attempt.

    Contents of containers and attributes of objects (graphs, dataclasses) are restored. Tensors are not copied; the version counter shows
    whether one was written in place.
    """

    def __init__(self, batch: Any) -> None:
        found = Walk().value(batch, (None, "batch", "global")).found
        self._batch, self._cells = batch, found.cells
        tensors = [one.tensor for one in found.tensors if not one.tensor.is_inference()]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._leaves = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors if tensor.is_leaf]

    def again(self) -> Any:
        """Restore the batch for another attempt, and return it.

        Raises:
            UndoError: If the failed attempt wrote one of its tensors in place.
        """
        for cell, contents in self._cells:
            cell.restore(contents)
        if any(tensor._version != version for tensor, version in self._versions):
            raise UndoError(
                "memory ran out in a step that had changed a tensor of its batch in place, so the step cannot be repeated exactly; "
                "let training_step make new tensors, or change the batch in MicroBatchRules(prepare=…), which runs once."
            )
        for tensor, requires_grad, gradient in self._leaves:
            _set_leaf(tensor, requires_grad=requires_grad, gradient=gradient)
        return self._batch


def _set_leaf(tensor: Tensor, *, requires_grad: bool, gradient: Tensor | None) -> None:
    """Restore `requires_grad` and `grad` of a leaf tensor."""
    if tensor.requires_grad != requires_grad and tensor.is_leaf:
        tensor.requires_grad_(requires_grad)
    if tensor.grad is not gradient:
        tensor.grad = gradient


_DICTS = ("_modules", "_parameters", "_buffers")


def _leaves_among(*several: Found) -> list[Tensor]:
    tensors = (entry.tensor for found in several for entry in found.tensors)
    return [one for one in tensors if one.requires_grad and one.is_leaf]


def _tensors_of(found: Found) -> list[FoundTensor]:
    """Return tensors that share the memory of large NumPy arrays."""
    tensors: list[FoundTensor] = []
    for array, path, slot in found.arrays:
        if array.nbytes > _SMALL_ARRAY and array.flags.writeable and array.dtype.kind in "biuf":
            try:
                tensors.append(FoundTensor(torch.from_numpy(np.asarray(array)), path, slot))
            except (TypeError, ValueError):  # a dtype that torch lacks, or negative strides
                continue
    return tensors
