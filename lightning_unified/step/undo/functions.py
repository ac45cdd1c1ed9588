"""Find the functions that a step may call, and the classes whose attributes it may change."""

import functools
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from lightning_unified.step.undo.cells import Cell, ClassCell
from lightning_unified.step.undo.kinds import is_ours, is_skipped
from lightning_unified.step.undo.names import named_globals

__all__ = ["class_cells", "hook_functions", "reached_functions"]

_DEEPEST = 2  # levels of module-level functions that are followed from a method


def hook_functions(owner: Any, hooks: Iterable[str]) -> list[FunctionType]:
    """Return the functions of the methods `hooks`, of all classes of `owner`.

    One class's method may call the next one's. Functions that decorators wrap are among them.
    """
    return list(_with_wrapped(function for hook in hooks for function in _methods(owner, hook)))


def reached_functions(module: nn.Module, hooks: Iterable[str]) -> list[FunctionType]:
    """Return the functions that a step of `module` may call, as far as names tell.

    These are the methods `hooks` of `module`, and the `forward` methods of its submodules. Methods of these classes follow if a function
    found so far names them. Module-level functions follow over two levels, except those of installed packages that have none of these
    classes: such a package, a logger for instance, may share its objects with other threads. Functions of torch, Lightning and the
    standard library are left out.
    """
    classes = _classes_of(module)
    methods, packages = _methods_by_name(classes), _packages_of(classes)
    first = [*hook_functions(module, hooks), *methods.get("forward", ())]
    found = dict.fromkeys(_with_wrapped(first))
    queue = [(function, 0) for function in found]
    while queue:
        function, depth = queue.pop()
        named = [one for name in _names_in(function.__code__) for one in methods.get(name, ())]
        called = [one for one in _called(function) if _is_known(one.__module__, packages)] if depth < _DEEPEST else []
        for others, level in ((named, 0), (called, depth + 1)):
            new = [one for one in _with_wrapped(others) if one not in found]
            found.update(dict.fromkeys(new))
            queue += [(one, level) for one in new]
    return list(found)


def class_cells(module: nn.Module, functions: Iterable[FunctionType]) -> list[Cell]:
    """Return the attributes of users' classes.

    These are the classes of `module` and its submodules, and those that `functions` name.
    """
    classes = _classes_of(module)
    packages = _packages_of(classes)
    values = [function.__globals__.get(name) for function in functions for name in named_globals(function)]
    named = [base for value in values if isinstance(value, type) for base in value.__mro__ if not is_ours(base)]
    known = [one for one in named if _is_known(one.__module__, packages)]
    return [ClassCell(one, (None, one.__name__, "global")) for one in dict.fromkeys([*classes, *known])]


def _classes_of(module: nn.Module) -> list[type]:
    """Return the users' classes of `module` and its submodules, with their bases."""
    kinds = dict.fromkeys(type(child) for child in module.modules())
    return list(dict.fromkeys(base for kind in kinds for base in kind.__mro__ if not is_ours(base)))


def _packages_of(classes: Iterable[type]) -> set[str]:
    return {one.__module__.partition(".")[0] for one in classes}


def _is_known(module: Any, packages: Collection[str]) -> bool:
    """Return whether the module of this name is in one of `packages`, or not installed as a package."""
    return isinstance(module, str) and (module.partition(".")[0] in packages or not _is_installed(module))


@functools.lru_cache(maxsize=4096)
def _is_installed(module: str) -> bool:
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(PurePath(path).parts)


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


def _called(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions that `function` names, directly or in a user's module."""
    scope, names = function.__globals__, _names_in(function.__code__)
    for name in named_globals(function):
        value = scope.get(name)
        held = [value]
        if isinstance(value, ModuleType) and not is_skipped(value.__name__):
            held = [vars(value).get(one) for one in names]
        yield from (one for one in held if isinstance(one, FunctionType))


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return all names in `code`: globals and attributes."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*inner)
