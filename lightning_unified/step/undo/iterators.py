"""Copy iterators at their position before a step, and restore the copies after a failure."""

import ast
import copy
import gc
import itertools
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lightning_unified.errors import UndoError
from lightning_unified.step.undo.cells import Cell, path_text
from lightning_unified.step.undo.kinds import Kind, kind_of
from lightning_unified.step.undo.states import Drawn

__all__ = ["NotedIterators", "put_stand_ins"]

_Entry = tuple[Cell, Any, Any]  # a cell, a name in it, and the iterator or tuple of iterators there
_Replaced = tuple[Cell, Any, Any, Any]  # the same, and the stand-in
_Memo = dict[int, tuple[Any, Any]]  # by id: an iterator, kept alive, and its copy

_WIDEST = 1000  # entries of a container that are searched for iterators
_TEE: Any = type(itertools.tee(())[0])
_BY_INDEX: Any = type(iter(np.zeros(1)))
_SEQUENCES = (list, tuple, str, bytes, range)
_OVER_ENTRIES: tuple[Any, ...] = (
    *(type(iter(kind())) for kind in (list, tuple, str, bytes, bytearray, dict, set, deque)),
    *(type(iter(view)) for view in ({}.values(), {}.items())),
    type(iter(range(0))),
    type(iter(range(1 << 70))),
    type(iter("é")),
    itertools.count,
    itertools.repeat,
    itertools.product,
    itertools.permutations,
    itertools.combinations,
    itertools.combinations_with_replacement,
)
_OVER_ITERATORS: tuple[Any, ...] = (
    enumerate,
    zip,
    itertools.compress,
    itertools.cycle,
    itertools.islice,
    itertools.pairwise,
    itertools.zip_longest,
    getattr(itertools, "batched", zip),  # since Python 3.12
)


class NotedIterators:
    """Iterators at their positions before a step.

    Iterators that are held in several places, such as `zip(numbers, numbers)`, stay one iterator after `restore`.

    Args:
        found: Each with its cell and name, after `put_stand_ins`.
        replaced: The result of `put_stand_ins`.
    """

    def __init__(self, found: Sequence[_Entry], replaced: Iterable[_Replaced] = ()) -> None:
        memo: _Memo = {}
        sources = {(id(cell.target), name): value for cell, name, value, other in replaced if not _drains(value, other)}
        self._sources = [(cell, name, sources.get((id(cell.target), name), value)) for cell, name, value in found]
        self._found = [(cell, name, _copied(value, memo)) for cell, name, value in found]
        self._draws = {id(one): (one, one.draws) for _, _, value in self._found for one in _stand_ins_in(value)}

    def lend(self) -> None:
        """Put copies in place until `give_back`, so that nothing advances the iterators themselves."""
        memo: _Memo = {}
        for cell, name, value in self._found:
            cell.put(name, _copied(value, memo))

    def give_back(self) -> None:
        """Put the iterators themselves in place, also those that a stand-in had replaced."""
        for cell, name, value in self._sources:
            cell.put(name, value)

    def restore(self) -> list[UndoError]:
        """Restore copies of the iterators; return an error for each stand-in that was drawn from."""
        memo: _Memo = {}
        errors: list[UndoError] = []
        for cell, name, value in self._found:
            if any(one.draws != self._draws[id(one)][1] for one in _stand_ins_in(value)):
                errors.append(_refusal(cell, name, value))
            cell.put(name, _copied(value, memo))
        return errors


def put_stand_ins(found: Iterable[_Entry]) -> list[_Replaced]:
    """Replace each iterator that cannot be copied, and return these with their stand-ins.

    An `itertools.tee` takes the place of an iterator that only advances when a value is drawn: both yield the same values, and a tee can
    be copied. A `Drawn` takes the place of any other, such as a Python generator, which may run a user's function at each draw.
    """
    put: dict[int, Any] = {}
    replaced: list[_Replaced] = []
    for cell, name, value in found:
        stand_in = _stand_in(value, put)
        if stand_in is not value:
            cell.put(name, stand_in)
            replaced.append((cell, name, value, stand_in))
    return replaced


def _drains(value: Any, stand_in: Any) -> bool:
    """Return whether a stand-in draws from `value` before the values are used, as a tee does."""
    if isinstance(value, tuple):
        return any(_drains(*pair) for pair in zip(value, stand_in, strict=True))
    return type(stand_in) is _TEE and stand_in is not value


def _stand_in(value: Any, put: dict[int, Any]) -> Any:
    """Return the stand-in for an iterator; for a tuple, one with its iterators replaced."""
    if kind_of(type(value)) is Kind.TUPLE:
        entries = [_stand_in(entry, put) for entry in value]
        is_same = all(one is other for one, other in zip(entries, value, strict=True))
        return value if is_same else tuple.__new__(type(value), entries)
    if kind_of(type(value)) is not Kind.ITERATOR or type(value) is Drawn:
        return value
    if id(value) not in put:
        try:
            _copied(value, {})
            put[id(value)] = value
        except (TypeError, AttributeError):
            put[id(value)] = itertools.tee(value, 1)[0] if _only_advances(value) else Drawn(value)
    return put[id(value)]


def _stand_ins_in(value: Any) -> list[Drawn]:
    if isinstance(value, tuple):
        return [one for entry in value for one in _stand_ins_in(entry)]
    return [value] if type(value) is Drawn else []


def _refusal(cell: Cell, name: Any, value: Any) -> UndoError:
    kinds = " and ".join(sorted({type(one.source).__name__ for one in _stand_ins_in(value)}))
    path = path_text((cell.path, name, cell.style))
    return UndoError(
        f"a step that is undone had drawn from {path}, a {kinds} that Python cannot copy, so the step cannot be repeated exactly. Draw from it in "
        "on_train_batch_start, which runs once a batch before the step, or hold an iterator that can be copied: over a list, or of a "
        "class of your own with attributes."
    )


def _copied(value: Any, memo: _Memo) -> Any:
    """Return a copy of an iterator at its present position, or of a tuple that holds some.

    The copy shares the sequences that the iterator iterates over.

    Raises:
        TypeError, AttributeError: If an iterator cannot be copied.
    """
    kind = kind_of(type(value))
    if kind is Kind.TUPLE:
        return tuple.__new__(type(value), (_copied(one, memo) for one in value))
    if kind is not Kind.ITERATOR or type(value) is Drawn:
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 ends `__reduce__` of itertools
        return _inner(value, memo)


def _inner(value: Any, memo: _Memo) -> Any:
    """Return a part of an iterator, with the iterators in it copied."""
    kind = kind_of(type(value))
    if kind is Kind.ITERATOR:
        if id(value) not in memo:
            memo[id(value)] = value, _rebuilt(value, memo)
        return memo[id(value)][1]
    if kind is Kind.TUPLE:
        return tuple.__new__(type(value), (_inner(one, memo) for one in value)) if _holds_iterators(value) else value
    if hasattr(value, "__next__") or _holds_iterators(value):
        raise TypeError(f"a {type(value).__name__} cannot be copied")
    return value


def _rebuilt(iterator: Any, memo: _Memo) -> Any:
    kind = type(iterator)
    if kind is itertools.count:
        counted = _counted(iterator)
        if counted is not None:
            return counted
    if kind is _TEE:
        if not _only_advances(iterator):
            raise TypeError("a tee over an iterator with effects cannot be copied")
        return copy.copy(iterator)
    make, arguments, *state = iterator.__reduce__()
    rebuilt = make(*(_inner(one, memo) for one in arguments))
    for one in state:
        if one is not None:
            rebuilt.__setstate__(_state(one, memo))
    return rebuilt


def _counted(counter: Any) -> Any:
    """Return a copy of an `itertools.count` of plain numbers; None for other numbers.

    The repr of a count of plain numbers holds its next number and step.
    """
    try:
        numbers = ast.literal_eval(repr(counter).removeprefix("count").replace(")", ",)"))
        copied = itertools.count(*numbers)
    except (ValueError, SyntaxError, TypeError):
        return None
    return copied if repr(copied) == repr(counter) else None


def _state(state: Any, memo: _Memo) -> Any:
    """Return the state of an iterator with its lists copied: `itertools.cycle` adds to its own."""
    if isinstance(state, tuple):
        return tuple(_state(one, memo) for one in state)
    return [_inner(one, memo) for one in state] if isinstance(state, list) else _inner(state, memo)


def _only_advances(iterator: Any) -> bool:
    """Return whether a draw from `iterator` runs no code of a user and changes nothing else.

    True of iterators over lists and other sequences, and of those of `itertools` over such iterators and without a function.
    """
    kind = type(iterator)
    parts = [part for part in gc.get_referents(iterator) if not isinstance(part, type)]
    if kind in _OVER_ENTRIES:
        return not any(hasattr(part, "__next__") or _holds_iterators(part) for part in parts)
    if kind is _BY_INDEX:
        return all(type(part) is np.ndarray for part in parts)
    if kind is itertools.chain:  # its sources, then the iterator over the present one
        return all(map(_only_advances, parts[1:])) and all(map(_are_sources, parts[:1]))
    if kind is _TEE:
        parts = [part for link in parts for part in gc.get_referents(link)]
    elif kind not in _OVER_ITERATORS:
        return False
    flat = [one for part in parts for one in (_entries(part) if type(part) is tuple else (part,))]
    return all(_only_advances(one) if hasattr(one, "__next__") else not _holds_iterators(one) for one in flat)


def _are_sources(iterator: Any) -> bool:
    """Return whether `iterator` yields sequences, and iterators that only advance."""
    held = [one for one in gc.get_referents(iterator) if type(one) in (list, tuple)]
    entries = [entry for one in held for entry in itertools.islice(_entries(one), _WIDEST + 1)]
    is_known = type(iterator) in _OVER_ENTRIES and len(entries) <= _WIDEST
    return is_known and all(
        type(entry) in _SEQUENCES or (hasattr(entry, "__next__") and _only_advances(entry)) for entry in entries
    )


def _holds_iterators(value: Any) -> bool:
    """Return whether a list or tuple holds iterators, or tuples with some."""
    if type(value) is not list and not isinstance(value, tuple):
        return False
    return any(
        hasattr(type(one), "__next__") or (isinstance(one, tuple) and _holds_iterators(one))
        for one in itertools.islice(_entries(value), _WIDEST)
    )


def _entries(value: list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    # a tuple inside an iterator may have empty places, at which Python code that reads them crashes
    return gc.get_referents(value) if isinstance(value, tuple) else value
