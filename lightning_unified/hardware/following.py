"""A budget that leaves room for other programs, followed while they come and go."""

import time
from collections.abc import Callable
from statistics import median_low

from lightning_unified.hardware.budget import Budget, follow_budget
from lightning_unified.hardware.reading import Reading

__all__ = ["BudgetFollower"]

_EVERY_S = 2.0
_HYSTERESIS = 0.05


class BudgetFollower:
    """Resolves a `leave` budget anew every two seconds, and says when it has changed by a twentieth or more.

    Two readings in a row must agree on the way: the one that is nearer to the budget so far is taken, and where they lie on both
    sides of it, nothing changes. So a program that only starts and ends moves nothing.

    Args:
        budget: As resolved at the start.
        clock: Seconds, of a clock that only goes forward.
    """

    def __init__(self, budget: Budget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self._clock = clock
        self._read_at = clock()
        self._before = budget

    @property
    def due(self) -> bool:
        """Whether it is time to read again; costs nothing to ask."""
        return self.budget.follows_others and self._clock() - self._read_at >= _EVERY_S

    def follow(self, reading: Reading) -> bool:
        """Take a reading; return whether `budget` is another one now."""
        self._read_at = self._clock()
        before, self._before = self._before, follow_budget(self.budget, reading)
        nearest = median_low([self.budget.bytes, before.bytes, self._before.bytes])
        if abs(nearest - self.budget.bytes) < _HYSTERESIS * self.budget.bytes:
            return False
        self.budget = before if nearest == before.bytes else self._before
        return True
