"""Cells of torch's own objects that a training step may write: optimizers and TorchScript modules."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.jit._script import RecursiveScriptModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.step.undo.cells import Cell, MappingCell, NamesCell, Path
from lightning_unified.step.undo.functions import reached_names

__all__ = ["OptimizerStateCell", "ScriptCell", "cells_of_optimizer"]


def cells_of_optimizer(optimizer: Optimizer, number: int, named: frozenset[str]) -> Iterator[Cell]:
    """Yield the options of parameter groups, and attributes and state that a step may reach.

    The step must name `optimizers` to reach others than the options. The state of the parameters is as large as the model, or larger. It is visited only for steps that also name `state`.

    Args:
        optimizer: The optimizer.
        number: Its index in `trainer.optimizers`.
        named: The names in methods that the step may call.
    """
    path: Path = (None, f"optimizers[{number}]", "global")
    for index, group in enumerate(optimizer.param_groups):
        yield MappingCell(group, (None, f"{path[1]}.param_groups[{index}]", "global"), skip=frozenset({"params"}))
    if "optimizers" in named:
        yield NamesCell(vars(optimizer), path, reached_names(type(optimizer), named), style="attribute")
        if "state" in named:
            yield OptimizerStateCell(optimizer, (path, "state", "attribute"))


class OptimizerStateCell(Cell):
    """The state of an optimizer; a parameter's entry is named by the parameter's number."""

    __slots__ = ("_labels",)

    def __init__(self, optimizer: Optimizer, path: Path) -> None:
        super().__init__(optimizer.state, path)
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        self._labels = {parameter: number for number, parameter in enumerate(parameters)}

    @override
    def copy(self) -> dict[Any, Any]:
        return {self._labels.get(key, key): value for key, value in self.target.items()}

    @override
    def restore(self, noted: dict[Any, Any]) -> None:
        for key in list(self.target):
            if self._labels.get(key, key) not in noted:
                del self.target[key]
        for label, value in noted.items():
            self.put(label, value)

    @override
    def entries(self, noted: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
        return noted.items()

    @override
    def put(self, name: Any, value: Any) -> None:
        self.target[self._key(name)] = value

    @override
    def remove(self, name: Any) -> None:
        self.target.pop(self._key(name), None)

    def _key(self, label: Any) -> Any:
        return next((key for key, own in self._labels.items() if own == label), label)


class ScriptCell(Cell):
    """The attributes of a TorchScript module: buffers and values that its code may assign.

    TorchScript returns a new list, dict or number at each read. A copy therefore holds the object of the copy before it while the two are
    equal.
    """

    __slots__ = ("_last", "_names")

    def __init__(self, module: RecursiveScriptModule, path: Path) -> None:
        super().__init__(module._c, path, style="attribute")
        attributes = module._concrete_type.get_attributes()
        kept = [name for name, (_, is_parameter) in attributes.items() if not is_parameter]
        self._names = [name for name in kept if name not in _NEVER_SET]
        self._last: dict[str, Any] = {}

    @override
    def copy(self) -> dict[str, Any]:
        read, last = self.target.getattr, self._last
        now = {name: value for name in self._names if isinstance(value := read(name), _SCRIPTED)}
        self._last = {
            name: last[name] if name in last and _is_equal(last[name], value) else value for name, value in now.items()
        }
        return self._last

    @override
    def restore(self, noted: dict[str, Any]) -> None:
        now = self.copy()
        for name, value in noted.items():
            if now[name] is not value:
                self.put(name, value)

    @override
    def entries(self, noted: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
        return noted.items()

    @override
    def put(self, name: Any, value: Any) -> None:
        self.target.setattr(name, value)


_NEVER_SET = frozenset({"_is_full_backward_hook"})  # of each module; TorchScript code cannot change it
_SCRIPTED = (Tensor, bool, int, float, complex, str, type(None), list, tuple, dict)


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values of TorchScript are equal; tensors are compared by identity."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)
