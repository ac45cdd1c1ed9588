"""The budget of a run on its device: resolved, handed to the allocator, and held against what the run really uses."""

import torch

from lightning_unified.hardware import (
    Budget,
    Cap,
    Figure,
    Reading,
    cap_allocator,
    read,
    read_peak,
    reset_peak,
    resolve_budget,
    set_mps_environment,
)
from lightning_unified.units import format_bytes

__all__ = ["BudgetWatch"]

_NEW_PEAK = 1.1  # a peak is told anew when it is a tenth higher than the one told last
_WATCH_EVERY = 8  # batches between two looks at the peak on a CPU, after as many looks at the first ones


class BudgetWatch:
    """What a run may use, and what it does use.

    Args:
        spec: The budget as written: `"auto"`, `"28GiB"`, `"60%"` of the pool, `"leave 6GiB"` for everything else.

    Attributes:
        device: The device whose pool it is.
        budget: The bytes the spec comes to; None before `resolve`.
        cap: What was done to hold the allocator to it.
    """

    def __init__(self, spec: str | int) -> None:
        self.spec = spec
        self.device = torch.device("cpu")
        self.budget: Budget | None = None
        self.cap: Cap | None = None
        self._batches = 0
        self._earlier_peak: int | None = None
        self._told = 0

    def prepare(self, device: torch.device) -> None:
        """Do what must be done before the device's allocator exists."""
        self.device = device
        if device.type == "mps":
            set_mps_environment(self.spec)

    def resolve(self) -> None:
        """Find the budget in bytes, and cap the allocator; before anything is allocated on the device.

        Raises:
            BudgetError: If the pool cannot give what was asked for.
        """
        self.budget = resolve_budget(self.spec, self.reading())
        self.cap = cap_allocator(self.device, self.budget)

    def begin(self) -> None:
        """Count the peak from here on."""
        reset_peak(self.device)
        self._batches = self._told = 0
        self._earlier_peak = None

    @property
    def bytes(self) -> int:
        """The budget in bytes, once it is resolved."""
        assert self.budget is not None, "the budget is resolved once the device is known"
        return self.budget.bytes

    def reading(self) -> Reading:
        """Return what the device's pool says now; never waits for the device."""
        return read(self.device)

    def room(self) -> int | None:
        """Return what the process could hold altogether now, in bytes, within its budget; None if unknown."""
        now = self.reading()
        if now.available.bytes is None:
            return None
        return min(self.bytes, now.available.bytes + (now.allocated.bytes or 0))

    def measured_peak(self) -> Figure:
        """Return the highest use of this fit so far, in bytes, and which counter says so."""
        now = read_peak(self.device)
        if now.bytes is None or self._earlier_peak is None or now.bytes >= self._earlier_peak:
            return now
        return Figure(self._earlier_peak, now.source)

    def overrun(self) -> str | None:
        """After a batch: return in words by how much its peak is above the budget, once for each new peak.

        On a CPU only, whose allocator has no cap: elsewhere the allocator raises before it gets there.
        """
        self._batches += 1
        if self.device.type != "cpu" or not (self._batches <= _WATCH_EVERY or self._batches % _WATCH_EVERY == 0):
            return None
        peak = read_peak(self.device).bytes
        if peak is None or peak <= max(self.bytes, _NEW_PEAK * self._told):
            return None
        self._earlier_peak, self._told = max(peak, self._earlier_peak or 0), peak
        return f"peak {format_bytes(peak)} above the budget of {format_bytes(self.bytes)}"

    def count_anew(self) -> None:
        """Let the peak show what a smaller size needs, where the counter can be set back."""
        if reset_peak(self.device):
            self._told = 0
