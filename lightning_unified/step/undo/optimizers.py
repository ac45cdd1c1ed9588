"""State of optimizers that a training step may write itself."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.step.undo.cells import Cell, MappingCell, NamesCell, Path
from lightning_unified.step.undo.functions import reached_names

__all__ = ["OptimizerStateCell", "cells_of_optimizer"]


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
