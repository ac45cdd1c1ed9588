"""The roots of the walk: module, callbacks, schedulers, and variables that steps name."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import nn

from lightning_unified.step.undo.cells import Cell, MappingCell
from lightning_unified.step.undo.functions import (
    cells_of_function,
    class_cells,
    named_functions,
    names_of,
    reached_functions,
)
from lightning_unified.step.undo.kinds import is_ours

__all__ = ["EVALUATION_STEPS", "TRAINING_STEP", "Roots", "roots_of"]

TRAINING_STEP = (
    "training_step",
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")

_STOPS = frozenset({"should_stop"})  # a signal's handler sets it at any time, also during a step


@dataclass(slots=True)
class Roots:
    """The start of a walk: modules, cells and trained parameters.

    Attributes:
        modules: Each with its name.
        cells: Attributes, closure variables, globals and class attributes that hold other values.
        trained: Ids of trained parameters, which `step.recovery` records.
        parameters: The lists that hold these parameters.
    """

    modules: list[tuple[nn.Module, str]] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    parameters: list[list[Any]] = field(default_factory=list)


def roots_of(module: L.LightningModule, trainer: L.Trainer | None, steps: Iterable[str]) -> Roots:
    """Return the roots from which a step of `module` may change state.

    Args:
        module: The LightningModule that is trained.
        trainer: The Trainer with the callbacks, optimizers and schedulers; None for the module alone.
        steps: Names of the methods that run in a step.
    """
    functions = reached_functions(module, steps)
    roots = Roots([(module, type(module).__name__)], [*names_of(functions), *class_cells(module)])
    for name, function in named_functions(functions):
        roots.cells += cells_of_function(function, (None, name, "global"))
    if trainer is None:
        return roots
    roots.cells.append(MappingCell(vars(trainer), (None, "trainer", "global"), style="attribute", skip=_STOPS))
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if not is_ours(type(callback)):
            path = (None, type(callback).__name__, "global")
            roots.cells.append(MappingCell(vars(callback), path, style="attribute"))
    for index, optimizer in enumerate(trainer.strategy.optimizers):
        for number, group in enumerate(optimizer.param_groups):
            path = (None, f"optimizers[{index}].param_groups[{number}]", "global")
            roots.cells.append(MappingCell(group, path, skip=frozenset({"params"})))
            roots.trained.update(id(one) for one in group["params"] if one.requires_grad)
            roots.parameters.append(group["params"])
    # a step computes with these, and the optimizer writes its shards of them
    roots.trained.update(id(one) for one in getattr(trainer.strategy, "whole_parameters", ()))
    for index, config in enumerate(trainer.strategy.lr_scheduler_configs):
        path = (None, f"lr_schedulers[{index}]", "global")
        roots.cells.append(MappingCell(vars(config.scheduler), path, style="attribute"))
    if not trainer.strategy.optimizers:
        roots.trained.update(id(one) for one in module.parameters() if one.requires_grad)
    return roots
