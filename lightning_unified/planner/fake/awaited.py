"""Loops that wait for a value: tell the places whose read must give True for a step to end."""

import sys
from collections.abc import Callable
from traceback import walk_tb
from types import CodeType
from typing import TypeAlias

__all__ = ["AWAITED", "AwaitedError", "Awaits", "Place", "reading_place"]

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


def reading_place() -> Place | None:
    """Return the code that reads a value now, and the place in it."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)
