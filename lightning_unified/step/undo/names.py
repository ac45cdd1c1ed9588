"""Find the globals, closure variables and default arguments that functions name."""

import dis
import functools
from collections.abc import Iterable
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import Any

from lightning_unified.step.undo.cells import Cell, ClosureCell, NamesCell, cells_of
from lightning_unified.step.undo.kinds import Kind

__all__ = ["names_of"]

_FIXED = (FunctionType, BuiltinFunctionType, type)  # these change only where a function assigns their name


def names_of(functions: Iterable[FunctionType]) -> list[Cell]:
    """Return the variables outside of `functions` that they name."""
    names: dict[int, tuple[dict[str, Any], set[str]]] = {}
    cells: dict[int, Cell] = {}
    for function in functions:
        scope = function.__globals__
        loaded, stored = _names_in(function.__code__)
        used = {name for name in loaded if name in scope and not isinstance(scope[name], _FIXED)}
        names.setdefault(id(scope), (scope, set()))[1].update(used | stored)
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


def _holds_function(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:
        return False


@functools.lru_cache(maxsize=4096)  # each scan asks again
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the globals that `code` loads, and those that it assigns or deletes."""
    loaded = frozenset(one.argval for one in dis.get_instructions(code) if one.opname in _LOADS)
    stored = frozenset(one.argval for one in dis.get_instructions(code) if one.opname in _STORES)
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return loaded.union(*(one for one, _ in inner)), stored.union(*(one for _, one in inner))


_LOADS, _STORES = ("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL", "DELETE_GLOBAL")
