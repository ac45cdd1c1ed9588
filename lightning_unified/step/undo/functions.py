"""Find the methods that a step may call, and what they may change outside of objects."""

import dis
import enum
import functools
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_unified.nn.module_tree.walks import modules_of
from lightning_unified.nn.second_run.libraries import is_ours, is_skipped
from lightning_unified.step.undo.cells import Cell, ClassCell, ClosureCell, MappingCell, NamesCell, Path, cells_of
from lightning_unified.step.undo.kinds import Kind

__all__ = [
    "cells_of_function",
    "class_cells",
    "classes_of",
    "hook_functions",
    "named_classes",
    "named_functions",
    "names_attribute",
    "names_in",
    "names_of",
    "reached_functions",
    "reached_names",
]


def hook_functions(owner: Any, hooks: Iterable[str]) -> list[FunctionType]:
    """Return the functions of the methods `hooks`, of all classes of `owner`.

    One class's method may call the next one's. Functions that decorators wrap are among them.
    """
    return list(_with_wrapped(function for hook in hooks for function in _methods(owner, hook)))


def reached_functions(module: nn.Module, hooks: Iterable[str]) -> list[FunctionType]:
    """Return the methods that a step of `module` may call, as far as names tell.

    These are the methods `hooks` of `module`, and the `forward` methods of its submodules. Methods of these classes follow if a method
    found so far names them. Module-level functions do not follow: what they keep may be shared with loggers, threads and tests. Methods of
    torch, Lightning and the standard library are left out.
    """
    methods = _methods_by_name(_classes_of(module))
    found = dict.fromkeys(_with_wrapped([*hook_functions(module, hooks), *methods.get("forward", ())]))
    queue = list(found)
    while queue:
        named = [one for name in _names_in(queue.pop().__code__) for one in methods.get(name, ())]
        new = [one for one in _with_wrapped(named) if one not in found]
        found.update(dict.fromkeys(new))
        queue += new
    return list(found)


def names_attribute(module: nn.Module, hooks: Iterable[str], attribute: str) -> bool:
    """Return whether a method that a step of `module` may call names an attribute."""
    return any(attribute in _names_in(function.__code__) for function in reached_functions(module, hooks))


def names_in(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Return all names in `functions`: globals and attributes."""
    return frozenset[str]().union(*(_names_in(one.__code__) for one in functions))


@functools.lru_cache(maxsize=256)
def reached_names(kind: type, named: frozenset[str]) -> tuple[str, ...]:
    """Return the attributes of objects of class `kind` that a step may reach.

    These are the names in the step. Names in methods of the class follow if a name found so far is theirs.
    """
    methods = _methods_by_name(classes_of(kind))
    found, queue = set(named), list(named)
    while queue:
        new = names_in(methods.get(queue.pop(), ())) - found
        found |= new
        queue += new
    return tuple(sorted(found - _OF_OPTIMIZERS if issubclass(kind, Optimizer) else found))


def class_cells(module: nn.Module) -> list[Cell]:
    """Return the attributes of the users' classes of `module` and its submodules."""
    return [ClassCell(one, (None, one.__name__, "global")) for one in _classes_of(module)]


def _classes_of(module: nn.Module) -> list[type]:
    """Return the users' classes of `module` and its submodules, with their bases."""
    kinds = dict.fromkeys(type(child) for child in modules_of(module))
    return list(dict.fromkeys(base for kind in kinds for base in classes_of(kind)))


@functools.lru_cache(maxsize=4096)
def classes_of(kind: type) -> tuple[type, ...]:
    """Return the users' classes among `kind` and its bases."""
    return tuple(base for base in kind.__mro__ if not is_ours(base))


def _methods_by_name(classes: Iterable[type]) -> dict[str, list[FunctionType]]:
    methods: dict[str, list[FunctionType]] = {}
    for one in classes:
        for name, value in vars(one).items():
            function = _function_of(value)
            if function is not None:
                methods.setdefault(name, []).append(function)
    return methods


def _methods(owner: Any, hook: str) -> Iterator[FunctionType]:
    for base in type(owner).__mro__:
        if hook in vars(base) and not is_ours(base) and (function := _function_of(vars(base)[hook])) is not None:
            yield function
    own = _function_of(vars(owner).get(hook))
    if own is not None:
        yield own


def _function_of(value: Any) -> FunctionType | None:
    """Return the function of a method, property or cached property; None for anything else."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    return value if isinstance(value, FunctionType) else None


def _with_wrapped(functions: Iterable[FunctionType]) -> Iterator[FunctionType]:
    """Yield users' functions, and those in their closures, such as a decorator's."""
    seen: set[FunctionType] = set()
    queue = list(functions)[::-1]
    while queue:
        function = queue.pop()
        if function in seen:
            continue
        seen.add(function)
        if not is_skipped(function.__globals__.get("__name__")):
            yield function
        held = (getattr(function, "__wrapped__", None), *_closed_over(function))
        queue += [one for one in held if isinstance(one, FunctionType)]


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return all names in `code`: globals and attributes."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*inner)


_FIXED = (FunctionType, BuiltinFunctionType, type)  # these change only where a function assigns their name


def names_of(functions: Iterable[FunctionType]) -> list[Cell]:
    """Return the variables outside of `functions` that they name."""
    names: dict[int, tuple[dict[str, Any], set[str]]] = {}
    cells: dict[int, Cell] = {}
    for function in functions:
        scope = function.__globals__
        loaded, stored = _globals_in(function.__code__)
        used = {name for name in loaded if name in scope and not isinstance(scope[name], _FIXED)}
        names.setdefault(id(scope), (scope, set()))[1].update(used | stored)
        cells.update((id(cell.target), cell) for cell in _own_cells(function, None, "global"))
    globals_ = [
        NamesCell(scope, (None, "globals", "global"), sorted(used), style="global")
        for scope, used in names.values()
        if used
    ]
    return [*globals_, *cells.values()]


def named_functions(functions: Iterable[FunctionType]) -> list[tuple[str, FunctionType]]:
    """Return the functions that globals named by `functions` hold, each with its name."""
    named = {}
    for function in functions:
        scope = function.__globals__
        held = ((name, scope.get(name)) for name in _globals_in(function.__code__)[0])
        named.update((one, name) for name, one in held if isinstance(one, FunctionType))
    return [(name, one) for one, name in named.items()]


def named_classes(functions: Iterable[FunctionType]) -> list[type]:
    """Return the users' classes that globals named by `functions` hold, with their bases.

    A step may count in such a class (`Globals.step += 1`).
    """
    held = (one.__globals__.get(name) for one in functions for name in sorted(_globals_in(one.__code__)[0]))
    kinds = dict.fromkeys(one for one in held if isinstance(one, type) and not issubclass(one, enum.Enum))
    return list(dict.fromkeys(base for kind in kinds for base in classes_of(kind)))


def cells_of_function(function: FunctionType, path: Path) -> list[Cell]:
    """Return the closure variables, mutable defaults and attributes of a user's function.

    Those of functions in its closure are among them. Globals that it names are not: loggers, threads and tests may share them.
    """
    cells: list[Cell] = []
    for one in _with_wrapped([function]):
        cells += _own_cells(one, path, "attribute")
        cells.append(MappingCell(vars(one), path, style="attribute"))
    return cells


def _own_cells(function: FunctionType, path: Path | None, style: str) -> Iterator[Cell]:
    """Yield the closure variables and mutable defaults of one function, found at `path`."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and not _holds_function(cell):
            yield ClosureCell(cell, (path, name, style), style="global")
    for defaults in (function.__defaults__, function.__kwdefaults__):
        for value in defaults.values() if isinstance(defaults, dict) else defaults or ():
            if isinstance(value, (list, dict, set)):
                kind = {list: Kind.LIST, dict: Kind.MAPPING, set: Kind.SET}.get(type(value), Kind.OBJECT)
                yield from cells_of(value, kind, (path, f"a default of {function.__qualname__}", style))


def _holds_function(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:
        return False


@functools.lru_cache(maxsize=4096)  # each scan asks again
def _globals_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the globals that `code` loads, and those that it assigns or deletes."""
    loaded = frozenset(one.argval for one in dis.get_instructions(code) if one.opname in _LOADS)
    stored = frozenset(one.argval for one in dis.get_instructions(code) if one.opname in _STORES)
    inner = [_globals_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return loaded.union(*(one for one, _ in inner)), stored.union(*(one for _, one in inner))


_OF_OPTIMIZERS = {"state", "param_groups"}  # `undo.torch_cells` records these
_LOADS, _STORES = ("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL", "DELETE_GLOBAL")
