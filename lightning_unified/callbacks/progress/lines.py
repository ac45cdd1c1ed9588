"""Progress as lines, for files, pipes, and terminals that several runs share."""

import math
from collections.abc import Mapping
from typing import Any

from lightning_unified.units import format_duration

__all__ = ["ProgressLines", "progress_line"]

_EVERY_S = 10.0
_SHARE = 0.02  # of the time so far: a run of a day writes about 300 lines


class ProgressLines:
    """Decide when a line is due: every ten seconds at first, later less often.

    Later means every fiftieth of the time so far.

    Args:
        step: The optimizer steps done before this process.
        now: The time of its start, in seconds of a monotonic clock.
    """

    def __init__(self, *, step: int, now: float) -> None:
        self._began = self._next = now
        self._last_step = step
        self._first: tuple[int, float] | None = None  # the step and time from which the speed is measured

    def due(self, step: int, *, total: float, now: float) -> bool:
        """Return whether a line is due after optimizer step `step` of `total`."""
        if step == self._last_step or (now < self._next and step < total):
            return False
        if self._first is None:  # the first step includes planning and compiling
            self._first = step, now
        self._last_step = step
        self._next = now + max(_EVERY_S, _SHARE * (now - self._began))
        return True

    def line(self, *, total: float, now: float, metrics: Mapping[str, Any]) -> str:
        """Return the line of the step that was due last; `now` is the time after it."""
        began, since = self._first or (self._last_step, now)
        each = (now - since) / (self._last_step - began) if self._last_step > began else None
        return progress_line(self._last_step, total=total, seconds_per_step=each, metrics=metrics)


def progress_line(step: int, *, total: float, seconds_per_step: float | None, metrics: Mapping[str, Any]) -> str:
    """Return one line, as in `step 50 of 600 (8 %), 1.2 s/step, 11 min 0 s left, loss=2.31`.

    Args:
        step: Optimizer steps done.
        total: Optimizer steps of the whole run; infinite if unknown.
        seconds_per_step: The mean time of a step; None if unknown.
        metrics: Further figures by name.
    """
    ends = math.isfinite(total) and total > 0
    parts = [f"step {step:,} of {total:,.0f} ({100 * step / total:.0f} %)" if ends else f"step {step:,}"]
    if seconds_per_step is not None:
        parts.append(f"{format_duration(seconds_per_step)}/step")
        if ends and step < total:
            parts.append(f"{format_duration(round((total - step) * seconds_per_step))} left")
    return ", ".join([*parts, *(f"{name}={_text(value)}" for name, value in metrics.items() if name != "v_num")])


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
