"""The roots of the walk: module, callbacks, schedulers, and variables that steps name."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import nn

from lightning_unified.nn.second_run.libraries import is_ours
from lightning_unified.step.undo.cells import Cell, ClassCell, MappingCell, NamesCell, cells_of
from lightning_unified.step.undo.functions import (
    cells_of_function,
    class_cells,
    named_classes,
    named_functions,
    names_in,
    names_of,
    reached_functions,
)
from lightning_unified.step.undo.kinds import Kind
from lightning_unified.step.undo.torch_cells import cells_of_optimizer

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

_LOADERS = ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")
_STOPS = frozenset({"should_stop"})  # a signal's handler sets it at any time, also during a step


@dataclass(slots=True)
class Roots:
    """The start of a walk: modules, cells and trained parameters.

    Attributes:
        modules: Each with its name.
        cells: Attributes, closure variables, globals and class attributes that hold other values.
        trained: Ids of trained parameters, which `step.recovery` records.
        parameters: The lists that hold these parameters.
        named: The names in methods that a step may call; of data and optimizers, only attributes with these names are visited.
        changing: Attributes that change at every step: those of schedulers, and the options that they set.
    """

    modules: list[tuple[nn.Module, str]] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    parameters: list[list[Any]] = field(default_factory=list)
    named: frozenset[str] = frozenset()
    changing: list[dict[str, Any]] = field(default_factory=list)


def roots_of(module: L.LightningModule, trainer: L.Trainer | None, steps: Iterable[str]) -> Roots:
    """Return the roots from which a step of `module` may change state.

    Args:
        module: The LightningModule that is trained.
        trainer: The Trainer with the callbacks, optimizers and schedulers; None for the module alone.
        steps: Names of the methods that run in a step.
    """
    functions = reached_functions(module, steps)
    roots = Roots([(module, type(module).__name__)], [*names_of(functions), *class_cells(module)])
    roots.named = names_in(functions)
    for name, function in named_functions(functions):
        roots.cells += cells_of_function(function, (None, name, "global"))
    roots.cells += [ClassCell(one, (None, one.__name__, "global")) for one in named_classes(functions)]
    if trainer is None:
        return roots
    roots.cells.append(MappingCell(vars(trainer), (None, "trainer", "global"), style="attribute", skip=_STOPS))
    if not roots.named.isdisjoint(_LOADERS):
        roots.cells += _cells_of_loaders(trainer)
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if not is_ours(type(callback)):
            path = (None, type(callback).__name__, "global")
            roots.cells.append(MappingCell(vars(callback), path, style="attribute"))
    for index, optimizer in enumerate(trainer.strategy.optimizers):
        roots.cells += cells_of_optimizer(optimizer, index, roots.named)
        for group in optimizer.param_groups:
            roots.trained.update(id(one) for one in group["params"] if one.requires_grad)
            roots.parameters.append(group["params"])
            roots.changing += [group] if trainer.strategy.lr_scheduler_configs else []
    # a step computes with these, and the optimizer writes its shards of them
    roots.trained.update(id(one) for one in getattr(trainer.strategy, "whole_parameters", ()))
    for index, config in enumerate(trainer.strategy.lr_scheduler_configs):
        path = (None, f"lr_schedulers[{index}]", "global")
        roots.cells.append(MappingCell(vars(config.scheduler), path, style="attribute"))
        roots.changing.append(vars(config.scheduler))
    if not trainer.strategy.optimizers:
        roots.trained.update(id(one) for one in module.parameters() if one.requires_grad)
    return roots


def _cells_of_loaders(trainer: L.Trainer) -> list[Cell]:
    """Return the places where the Trainer's loops hold their loaders."""
    fit = trainer.fit_loop
    cells: list[Cell] = []
    for loop in (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        path = (None, type(loop).__name__, "global")
        cells.append(NamesCell(vars(loop), path, ("_combined_loader",), style="attribute"))
        if loop._combined_loader is not None:
            cells += cells_of(loop._combined_loader.flattened, Kind.LIST, (path, "dataloaders", "attribute"))
    return cells
