"""Walk over everything that a step may change, from a few roots."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_unified.step.undo.cells import Cell, ClassCell, MappingCell, NamesCell, Path, cells_of
from lightning_unified.step.undo.functions import cells_of_function, classes_of, reached_names
from lightning_unified.step.undo.kinds import Kind, holds_iterators, kind_of
from lightning_unified.step.undo.torch_cells import ScriptCell

__all__ = ["HOOKS", "Found", "FoundTensor", "Walk"]

_DEEPEST = 12  # levels of nested containers and objects that a walk visits
_WIDEST = 1000  # a container with more entries: its entries are recorded and not visited
_MANY = 64  # in a container with more tensors, none is copied: it gathers results, and no step writes these again

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a module
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
# torch/_dynamo/decorators.py and variables/builder.py note these on tensors that a compiled call gets
_OF_COMPILER = frozenset(
    f"_dynamo_{name}"
    for name in (
        "dynamic_indices",
        "dynamic_range",
        "hint_overrides",
        "propagated_dynamic_indices",
        "shape_ids",
        "static_indices",
        "static_input_type",
        "strict_unbacked_indices",
        "unbacked_bounds",
        "unbacked_indices",
        "weak_dynamic_indices",
    )
)
_OF_METRICS = _OF_MODULES | {"_defaults", "_persistent", "_reductions", "_update_signature", "update", "compute"}
_TENSOR_DICTS = ("_parameters", "_buffers")
_INERT, _TENSOR = Kind.INERT, Kind.TENSOR  # faster than the attributes of an enum, which a function looks up


@dataclass(slots=True, eq=False)
class FoundTensor:
    """A tensor that a step may change in place, and its place.

    Attributes:
        tensor: The tensor.
        path: Where it was found first.
        slot: The id of its container and its name there; another tensor in the same place has the same slot.
        copied: True if it must be copied before every step, False if it need not be, None if its size decides.
        is_buffer: Whether it is a module's buffer.
    """

    tensor: Tensor
    path: Path
    slot: tuple[int, Any]
    copied: bool | None = None
    is_buffer: bool = False


@dataclass(slots=True, eq=False)
class Found:
    """The results of a walk: cells with their contents, values with a state, and tensors.

    Attributes:
        cells: Each with a copy of its contents.
        states: Generators and other values with a state, each with its path.
        iterators: Iterators, and tuples that hold some, each with its cell and its name there.
        arrays: NumPy arrays, with their paths and slots.
        tensors: Tensors that are not trained.
        modules: Modules that the walk met, with their paths.
        deferred: Cells that are left for another walk.
    """

    cells: list[tuple[Cell, Any]] = field(default_factory=list)
    states: list[tuple[Any, Path]] = field(default_factory=list)
    iterators: list[tuple[Cell, Any, Any]] = field(default_factory=list)
    arrays: list[tuple[Any, Path, tuple[int, Any]]] = field(default_factory=list)
    tensors: list[FoundTensor] = field(default_factory=list)
    modules: list[tuple[nn.Module, Path]] = field(default_factory=list)
    deferred: list[Cell] = field(default_factory=list)


class Walk:
    """Visits each object once.

    Attributes:
        found: The results so far.
        seen: Ids of all visited objects.

    Args:
        trained: Ids of the trained parameters, which others record.
        known: Ids of objects to skip, because another walk found them.
        named: The names in the step; of data and optimizers, only attributes with these names are visited.
        defers: Returns whether to leave a cell for another walk, given the cell and its entries that can change; None leaves none.
    """

    def __init__(
        self,
        *,
        trained: Collection[int] = (),
        known: Collection[int] = (),
        named: frozenset[str] = frozenset(),
        defers: Callable[[Cell, "list[_Entry]"], bool] | None = None,
    ) -> None:
        self.found = Found()
        self._trained, self._known, self._named, self._defers = trained, known, named, defers
        self.seen: set[int] = set()
        self._queue: list[tuple[Cell, int, bool]] = []

    def cells(self, cells: Iterable[Cell]) -> "Walk":
        """Visit the contents of `cells`."""
        for cell in cells:
            self._add(cell, 0, is_metric=False)
        return self._finish()

    def value(self, value: Any, path: Path) -> "Walk":
        """Visit `value`."""
        self._take(None, path[1], value, kind_of(type(value)), path, 0)
        return self._finish()

    def module(self, module: nn.Module, path: Path) -> "Walk":
        """Visit the attributes and tensors of `module`.

        Submodules are added to `found.modules` and not visited.
        """
        is_metric = isinstance(module, Metric)
        skip = _OF_METRICS if is_metric else _OF_MODULES
        self._add(MappingCell(vars(module), path, style="attribute", skip=skip), 0, is_metric=is_metric)
        if isinstance(module, RecursiveScriptModule):
            self._script(module, path)
            return self._finish()
        self._hooks(module, HOOKS, path)
        for name in ("_modules", *_TENSOR_DICTS):
            entries = vars(module).get(name)
            if entries:
                cell = MappingCell(entries, path, style="attribute")
                if name == "_modules":
                    self._add(cell, 0, is_metric=False)
                else:
                    self._tensors(cell, is_norm=isinstance(module, _NormBase), is_buffer=name == "_buffers")
        return self._finish()

    def _hooks(self, owner: nn.Module | Tensor, names: Iterable[str], path: Path) -> None:
        """Visit the hooks of a module or tensor, which may keep state."""
        for name in names:
            for number, hook in enumerate((getattr(owner, name, None) or {}).values()):
                own = ((path, name, "attribute"), number, "item")
                self._take(None, number, hook, kind_of(type(hook)), own, 0)

    def _script(self, module: RecursiveScriptModule, path: Path) -> None:
        """Visit a TorchScript module, which holds its contents outside of Python."""
        self._add(ScriptCell(module, path), 0, is_metric=False)
        self.found.modules += [(child, (path, name, "attribute")) for name, child in module.named_children()]
        for name, parameter in module.named_parameters(recurse=False):
            if self._is_new(parameter):
                self.found.tensors.append(FoundTensor(parameter, (path, name, "attribute"), (id(module), name)))

    def _tensors(self, cell: Cell, *, is_norm: bool, is_buffer: bool) -> None:
        if self._is_seen(cell.target):
            return
        noted = cell.copy()
        for name, tensor in noted.items():
            if type(tensor) in (Tensor, nn.Parameter):
                path = (cell.path, name, "attribute")
                self._add(MappingCell(vars(tensor), path, style="attribute", skip=_OF_COMPILER), 0, is_metric=False)
                self._hooks(tensor, _HOOKS_OF_TENSORS, path)
        if all(id(tensor) in self._trained for tensor in noted.values()):
            return  # true of most dicts of parameters; comparing them before every step would take a third of the time
        self.found.cells.append((cell, noted))
        for name, tensor in noted.items():
            if tensor is None or not self._is_new(tensor):
                continue
            # kernels of normalisation layers write running statistics without moving version counters (torch 2.13)
            copied = True if is_norm and is_buffer else None
            path = (cell.path, name, "attribute")
            self.found.tensors.append(FoundTensor(tensor, path, (id(cell.target), name), copied, is_buffer))

    def _finish(self) -> "Walk":
        while self._queue:
            self._open(*self._queue.pop())
        return self

    def _is_seen(self, value: Any) -> bool:
        identity = id(value)
        if identity in self._known or identity in self.seen:
            return True
        self.seen.add(identity)
        return False

    def _add(self, cell: Cell, depth: int, *, is_metric: bool) -> None:
        if not self._is_seen(cell.target):
            self._queue.append((cell, depth, is_metric))

    def _open(self, cell: Cell, depth: int, is_metric: bool) -> None:
        noted = cell.copy()
        entries = _changeable(cell, noted) if noted else []
        if self._defers is not None and self._defers(cell, entries):
            self.seen.discard(id(cell.target))
            self.found.deferred.append(cell)
            return
        self.found.cells.append((cell, noted))
        if not entries or depth >= _DEEPEST or len(entries) > _WIDEST:
            return
        many = len(entries) > _MANY and sum(kind is _TENSOR for _, _, kind in entries) > _MANY
        copied = False if many else (True if is_metric else None)
        path, style, slot = cell.path, cell.style, id(cell.target)
        for name, value, kind in entries:
            if kind is _TENSOR:
                if self._is_new(value):
                    self.found.tensors.append(FoundTensor(value, (path, name, style), (slot, name), copied))
            else:
                self._take(cell, name, value, kind, (path, name, style), depth)

    def _take(self, cell: Cell | None, name: Any, value: Any, kind: Kind, path: Path, depth: int) -> None:
        found = self.found
        if kind is _TENSOR:
            if self._is_new(value):
                found.tensors.append(FoundTensor(value, path, (id(value), name)))
        elif kind is Kind.ITERATOR:
            if cell is not None:
                found.iterators.append((cell, name, value))
        elif kind is _INERT or self._is_seen(value):
            return
        elif kind is Kind.TUPLE:
            if cell is not None and holds_iterators(value):
                found.iterators.append((cell, name, value))
            if depth < _DEEPEST:
                for index, entry in enumerate(value):
                    self._take(None, index, entry, kind_of(type(entry)), (path, index, "item"), depth + 1)
        elif kind is Kind.PARTIAL:
            for name_, part in (("args", value.args), ("keywords", value.keywords), ("func", value.func)):
                self._take(None, name_, part, kind_of(type(part)), (path, name_, "attribute"), depth + 1)
        elif kind is Kind.METHOD:
            for name_, part in (("__self__", value.__self__), ("__func__", value.__func__)):
                self._take(None, name_, part, kind_of(type(part)), (path, name_, "attribute"), depth + 1)
        elif kind is Kind.FUNCTION:
            self._cells_at(cells_of_function(value, path), depth + 1)
        elif kind is Kind.NAMED:
            names = reached_names(type(value), self._named) if self._named and hasattr(value, "__dict__") else ()
            self._cells_at([NamesCell(vars(value), path, names, style="attribute")] if names else (), depth + 1)
        elif kind is Kind.MODULE:
            found.modules.append((value, path))
        elif kind is Kind.STATE:
            found.states.append((value, path))
        elif kind is Kind.ARRAY:
            found.arrays.append((value, path, (id(value) if cell is None else id(cell.target), name)))
        else:
            self._cells_at(cells_of(value, kind, path), depth + 1, seen=value)
            if not self._is_seen(type(value)):
                self._cells_at(
                    (ClassCell(one, (None, one.__name__, "global")) for one in classes_of(type(value))),
                    depth + 1,
                    seen=type(value),
                )

    def _cells_at(self, cells: Iterable[Cell], depth: int, *, seen: Any = None) -> None:
        """Visit cells later; `seen` is known already."""
        for one in cells:
            if one.target is seen or not self._is_seen(one.target):
                self._queue.append((one, depth, False))

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is to be recorded and was not met before."""
        identity = id(tensor)
        if identity in self._trained or identity in self._known or identity in self.seen:
            return False
        self.seen.add(identity)
        return not is_lazy(tensor)


_Entry = tuple[Any, Any, Kind]


def _changeable(cell: Cell, noted: Any) -> list[_Entry]:
    """Return the entries of a cell that are mutable, with their names and kinds."""
    return [(name, value, kind) for name, value in cell.entries(noted) if (kind := kind_of(type(value))) is not _INERT]
