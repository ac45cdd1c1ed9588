"""Places whose read must give True for a step to end: loops that wait for a value, and checks that raise."""

import dis
import sys
from collections.abc import Callable
from functools import cache
from traceback import walk_tb
from types import CodeType
from typing import TypeAlias

__all__ = ["AWAITED", "AwaitedError", "Awaits", "Place", "operation_after", "reading_places"]

AWAITED = "True, for which a loop waits"
"""The answer of a read that ends a loop; it hides how much the loop's last iterations keep."""

Place: TypeAlias = tuple[CodeType, int]
"""Code that reads a value, and the place in it."""

_BETWEEN = (
    "lightning_unified.",
    "torch._",
    "torch.utils._",
    "torch.overrides",
)  # modules between a read and its answer
_DEPTH = 3  # judgement: a check such as `is_valid(x)` is a function or two
_FILLERS = frozenset(
    ("CACHE", "EXTENDED_ARG", "NOP", "TO_BOOL", "UNARY_NOT")
)  # between a call and what takes its result
_PATIENCE = 128  # judgement: reads of one place; more cost seconds, and an optimizer may read a value of each parameter
_SOON = 8  # judgement: reads of another place of a loop that is known to wait

_AWAITED: set[Place] = set()  # places that read True from then on
_SUSPECTS: set[Place] = set()  # places that were read as often as one of those
_NEVER: set[Place] = set()  # places where the step failed after they had read True


class AwaitedError(RuntimeError):
    """A loop that waits for True was found, so the dry run begins anew."""


class Awaits:
    """Finds loops that repeat until a value is True, such as an adaptive solver's step that must be accepted.

    All unknown flags read False, so these loops never end. Their iterations keep no memory. So a place that reads False many times in
    a row, while the number of live storages stays the same, reads True from the next dry run on: the peak does not depend on how often
    such a loop runs. Other loops keep False: the more iterations of a loop with `if done.all(): break`, the more memory it takes.

    Args:
        live: Returns the number of live storages.
    """

    def __init__(self, live: Callable[[], int]) -> None:
        self._live = live
        self._seen: dict[Place, tuple[int, int]] = {}
        self._granted: set[Place] = set()
        self._has_found = False

    def answer(self, place: Place | None) -> bool:
        """Return what an unknown flag reads at `place`.

        Raises:
            AwaitedError: If a loop waits there for True.
        """
        if place is None or place in _NEVER:
            return False
        if place in _AWAITED:
            self._granted.add(place)
            return True
        live = self._live()
        before, count = self._seen.get(place, (live, 0))
        self._seen[place] = (live, count + 1 if live == before else 1)
        if count >= (_SOON if place in _SUSPECTS else _PATIENCE):
            _AWAITED.add(place)
            _SUSPECTS.update(other for other, (_, times) in self._seen.items() if times >= _PATIENCE)
            self._has_found = True
            raise AwaitedError(f"{place[0].co_name} waits for a value that is True")
        return False

    def learn_from(self, error: Exception) -> bool:
        """Return whether a dry run that ended with `error` must begin anew, with other answers."""
        if self._has_found:
            return True
        codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
        wrong = {place for place in self._granted if place[0] in codes}
        _NEVER.update(wrong)
        _AWAITED.difference_update(wrong)
        return bool(wrong)


def reading_places() -> tuple[Place, ...]:
    """Return the code that reads a value now and the place in it, then the same of its callers, a few at most."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    found: list[Place] = []
    while frame is not None and len(found) < _DEPTH:
        found.append((frame.f_code, _call_at(frame.f_code, frame.f_lasti)))
        frame = frame.f_back
    return tuple(found)


@cache
def _call_at(code: CodeType, at: int) -> int:
    """Return where the call begins that runs at `at`.

    A call is two operations in Python 3.11, and once the interpreter has specialized it, the first of them runs all of it.
    """
    operations = list(dis.get_instructions(code))
    number = sum(one.offset <= at for one in operations) - 1
    return operations[number + (operations[number].opname == "PRECALL")].offset


def operation_after(place: Place) -> str:
    """Return the name of the operation that takes what a call at `place` returns, such as `RETURN_VALUE`."""
    code, at = place
    following = (one.opname for one in dis.get_instructions(code) if one.offset > at)
    return next((name for name in following if name not in _FILLERS), "")
