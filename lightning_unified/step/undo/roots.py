"""The roots of the walk: module, callbacks, schedulers, and variables that steps name."""

import builtins
import dis
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

import lightning as L
from torch import nn

from lightning_unified.step.undo.cells import Cell, ClosureCell, MappingCell, NamesCell, cells_of
from lightning_unified.step.undo.kinds import Kind, is_ours

__all__ = ["EVALUATION_STEPS", "TRAINING_STEP", "Roots", "names_of", "roots_of"]

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


@dataclass(slots=True)
class Roots:
    """The start of a walk: modules, cells and trained parameters.

    Attributes:
        modules: Each with its name.
        cells: Attributes, closure variables and globals that hold other values.
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
    roots = Roots([(module, type(module).__name__)], names_of(module, steps))
    if trainer is None:
        return roots
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


def names_of(owner: Any, hooks: Iterable[str]) -> list[Cell]:
    """Return the variables outside of `owner` that its methods `hooks` name.

    The search covers the methods of all its classes, because one may call the next. It covers the functions nested in them and wrapped by
    their decorators, but not the functions that they call.
    """
    names: dict[int, tuple[dict[str, Any], set[str]]] = {}
    cells: dict[int, Cell] = {}
    for function in _functions(owner, hooks):
        scope = function.__globals__
        used = {name for name in _globals_named(function.__code__) if name in scope or name not in vars(builtins)}
        names.setdefault(id(scope), (scope, set()))[1].update(used)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and not _holds_function(cell):
                cells[id(cell)] = ClosureCell(cell, (None, name, "global"), style="global")
        for defaults in (function.__defaults__, function.__kwdefaults__):
            for value in defaults.values() if isinstance(defaults, dict) else defaults or ():
                if isinstance(value, (list, dict, set)):
                    kind = {list: Kind.LIST, dict: Kind.MAPPING, set: Kind.SET}.get(type(value), Kind.OBJECT)
                    path = (None, f"a default of {function.__qualname__}", "global")
                    cells.update((id(cell), cell) for cell in cells_of(value, kind, path))
    globals_ = [
        NamesCell(scope, (None, "globals", "global"), sorted(used), style="global")
        for scope, used in names.values()
        if used
    ]
    return [*globals_, *cells.values()]


def _functions(owner: Any, hooks: Iterable[str]) -> Iterator[FunctionType]:
    for hook in hooks:
        methods = [vars(base)[hook] for base in type(owner).__mro__ if hook in vars(base) and not is_ours(base)]
        own = vars(owner).get(hook)
        for method in methods if own is None else [*methods, own]:
            seen: set[int] = set()
            queue = [getattr(method, "__func__", method)]
            while queue:
                function = queue.pop()
                if not isinstance(function, FunctionType) or id(function) in seen:
                    continue
                seen.add(id(function))
                yield function
                queue += [getattr(function, "__wrapped__", None), *_decorated(function, hook)]


def _decorated(function: FunctionType, hook: str) -> list[FunctionType]:
    """Return the method inside a decorator that does not use `functools.wraps`.

    It is the function in the wrapper's closure that has the hook's name.
    """
    held = [cell.cell_contents for cell in function.__closure__ or () if _holds_function(cell)]
    return [one for one in held if one.__name__ == hook]


def _holds_function(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)  # each step asks again
def _globals_named(code: CodeType) -> frozenset[str]:
    named = {one.argval for one in dis.get_instructions(code) if one.opname in _OPERATIONS}
    return frozenset(named).union(*(_globals_named(one) for one in code.co_consts if isinstance(one, CodeType)))


_OPERATIONS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
