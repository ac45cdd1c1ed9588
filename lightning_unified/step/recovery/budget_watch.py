"""The budget of a run: resolve it, cap the allocator, compare it with the memory in use."""

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from lightning_unified.cost_model.backends import hidden_bytes
from lightning_unified.hardware import (
    Budget,
    BudgetFollower,
    Cap,
    Figure,
    Reading,
    Sources,
    cap_allocator,
    divide_budget,
    parse_spec,
    prepare_allocators,
    read,
    read_peak,
    reset_peak,
    resolve_budget,
)
from lightning_unified.hardware.allocators.settings import AllocatorSettings, allocator_settings
from lightning_unified.hardware.environment.segments import expand_segments, segments_expand
from lightning_unified.hardware.host.memory import resident_files
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.step.recovery.oom import empty_cache, release_cached_memory
from lightning_unified.units import format_bytes

__all__ = ["BudgetWatch"]

log = logging.getLogger("lightning_unified")

_NEW_PEAK = 1.1  # a peak is reported again when it is a tenth higher than the last reported one
_WATCH_EVERY = 8  # a CPU's peak is read after each of the first 8 batches, then after every 8th
# Judgement: a process may exceed its budget by a hundredth, for memory beside tensors, before a batch shrinks.
_NO_TENSORS = 1.01
_NEW_CAP = 0.05  # the allocator gets a new cap when it is a twentieth higher or lower


class _PeakReports:
    """Decides when a peak above the budget is reported: once for each new peak.

    Attributes:
        highest: The highest peak noted or reported in this fit, in bytes, as the counter may restart; 0 before the first.
    """

    def __init__(self) -> None:
        self.highest = self._last = self._batches = 0

    def is_due(self) -> bool:
        """Count a batch; return whether a CPU's peak is read after it."""
        self._batches += 1
        return self._batches <= _WATCH_EVERY or self._batches % _WATCH_EVERY == 0

    def is_new(self, peak: int, *, beside: int, allowed: float) -> bool:
        """Return whether `peak` minus `beside` bytes exceeds `allowed` bytes and the last report."""
        if peak - beside <= max(allowed, _NEW_PEAK * self._last):
            return False
        self.highest, self._last = max(peak, self.highest), peak
        return True

    def note(self, peak: int) -> None:
        """Note a peak that no report is due for, before the counter restarts."""
        self.highest = max(peak, self.highest)

    def start_over(self) -> None:
        """Report any peak above the budget again."""
        self._last = 0


class BudgetWatch:
    """The budget of a run, and its use of memory.

    Args:
        spec: The budget as written: `"auto"`, `"28GiB"`, `"60%"` of the pool, `"leave 6GiB"` for everything else.
        machine: A simulated machine. The budget is then one of its pool, while the CPU does the work.

    Raises:
        BudgetError: If the budget cannot be read.

    Attributes:
        device: The device whose pool the budget is taken from.
        budget: The resolved budget; None before `resolve`. A `leave` budget changes during a run.
        written: The settings written before the allocator exists, which it reads when it is created; None on a CPU.
        cap: How the allocator is held to the budget.
        sharers: Processes of this run that use the same pool; each gets an equal share of the budget.
        driver_bytes: Bytes that Metal holds for the process beside the allocator's heaps. The allocator counts them
            against its cap. 0 elsewhere.
        expands: Whether the segments of a CUDA allocator expand.
    """

    def __init__(self, spec: str | int, machine: SimulatedMachine | None = None) -> None:
        parse_spec(spec)  # a budget that cannot be read is refused where it is written
        self.spec = spec
        self.machine = machine
        self._elsewhere = _sources_of(machine)
        self._on_machine = ExitStack()
        self.device = torch.device("cpu")
        self.budget: Budget | None = None
        self.written: Cap | None = None
        self.cap: Cap | None = None
        self._follower: BudgetFollower | None = None
        self._has_followed = False
        self.sharers = 1
        self.driver_bytes = 0
        self.expands = False
        self._peaks = _PeakReports()
        self._files = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without simulated counters and the follower."""
        return {**vars(self), "_elsewhere": None, "_on_machine": ExitStack(), "_follower": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state; the copy reads its own simulated machine."""
        vars(self).update(state, _elsewhere=_sources_of(state["machine"]))

    def prepare(self, device: torch.device) -> None:
        """Write the allocator's settings; call it before any query, which creates the allocator."""
        device = device if self.machine is None else torch.device(self.machine.device)
        if device.type != "cpu" and (self.written is None or device.type != self.device.type):
            self.written = prepare_allocators(self.spec, **self._elsewhere)
        self.device = device

    def resolve(self) -> None:
        """Resolve the budget in bytes, and cap the allocator.

        Call it before any allocation on the device.

        Raises:
            BudgetError: If the pool cannot give the requested bytes.
        """
        reading = self.reading()
        self.budget = divide_budget(resolve_budget(self.spec, reading), reading, sharers=self.sharers)
        self.cap = cap_allocator(self.device, self.budget, **self._elsewhere)
        self.expands = self.device.type == "cuda" and segments_expand(**self._elsewhere)
        if self.device.type == "mps":
            self.release()
            held = self.reading()
            self.driver_bytes = max((held.reserved.bytes or 0) - (held.allocated.bytes or 0), 0)
        if self.cap.warning is not None:
            log.warning("The cap of %s stands, but %s.", format_bytes(self.cap.bytes), self.named(self.cap.warning))

    def enter(self, module: torch.nn.Module) -> None:
        """Count `module`'s tensors, and all made until `leave`, on the simulated machine, if any."""
        self.leave()
        if self.machine is not None:
            held = [*module.parameters(), *module.buffers()]
            self._on_machine.enter_context(self.machine.active(holding=held, kernels=hidden_bytes))

    def leave(self) -> None:
        """Leave the simulated machine; its peak stays known."""
        self._on_machine.close()
        if self.machine is not None:
            self.machine.forget()

    def off_device(self) -> AbstractContextManager[None]:
        """Return a block inside which the host computes, of a simulated machine too."""
        return nullcontext() if self.machine is None else self.machine.off_device()

    def release(self) -> None:
        """Release cached memory; call it outside any `except` block."""
        release_cached_memory(self.device, **self._elsewhere)

    def expand_segments(self) -> bool:
        """Let the segments of a CUDA allocator expand; return whether that has changed anything."""
        if self.expands or self.machine is not None or not expand_segments(self.device, **self._elsewhere):
            return False
        self.expands = True
        empty_cache(self.device, **self._elsewhere)
        return True

    def named(self, reason: str) -> str:
        """Return `reason`, with the name of the simulated machine before it, if there is one."""
        return reason if self.machine is None else f"simulated {self.machine.profile.name}: {reason}"

    def begin(self) -> None:
        """Start counting the peak, and follow other programs if the budget is a `leave` budget."""
        reset_peak(self.device, **self._elsewhere)
        self._files = self._resident_files()
        self._follower = None if self.budget is None else BudgetFollower(self.budget)
        self._has_followed = False
        self._peaks = _PeakReports()

    @property
    def counts_process(self) -> bool:
        """Whether the pool's counters cover the whole process, as on a CPU, not only tensors."""
        return self.device.type == "cpu"

    @property
    def allocator(self) -> AllocatorSettings:
        """Settings of the device's allocator."""
        return allocator_settings(self._sources, on_host=self.counts_process, expandable=self.expands)

    @property
    def _sources(self) -> Sources:
        return self._elsewhere.get("sources") or Sources.live()

    @property
    def fresh_code_bytes(self) -> int:
        """Resident bytes of files that came in since `begin`; 0 except on a CPU.

        Most of them are code that ran for the first time. The counters include them, but the budget does not: the
        system drops them when memory is short.
        """
        return max(self._resident_files() - self._files, 0)

    def _resident_files(self) -> int:
        return resident_files(self._sources) if self.counts_process else 0

    @property
    def bytes(self) -> int:
        """The budget in bytes, once it is resolved."""
        assert self.budget is not None, "the budget is resolved once the device is known"
        return self.budget.bytes

    def reading(self) -> Reading:
        """Return the counters of the device's pool. Never waits for the device."""
        return read(self.device, **self._elsewhere)

    def room(self) -> int | None:
        """Return the bytes that the process can hold in total within its budget; None if unknown."""
        now = self.reading()
        if now.available.bytes is None:
            return None
        return min(self.bytes, now.available.bytes + (now.allocated.bytes or 0))

    def measured_peak(self) -> Figure:
        """Return the highest use of this fit so far, in bytes, and the counter it comes from."""
        now = read_peak(self.device, **self._elsewhere)
        if now.bytes is None or now.bytes >= self._peaks.highest:
            return now
        return Figure(self._peaks.highest, now.source)

    def follow(self) -> str | None:
        """Resolve a `leave` budget again if it is due; return its change in words.

        Call it between two batches. The cap follows the budget, but never below the memory that the run has just held.
        Otherwise a step would fail where a smaller micro-batch would do. Once the run holds less, the cap comes down
        too. Memory that a lower budget frees goes back to the system at once.
        """
        follower = self._follower
        if follower is None or not follower.due:
            return None
        self._has_followed = True
        before, reading = self.bytes, self.reading()
        has_changed = follower.follow(reading)
        self.budget = follower.budget
        capped = replace(self.budget, bytes=max(self.bytes, reading.reserved.bytes or 0, reading.peak.bytes or 0))
        if self.device.type != "cpu" and _has_moved(self.cap, capped.bytes):
            self.cap = cap_allocator(self.device, capped, **self._elsewhere)
        if not has_changed:
            return None
        if self.bytes < before:
            self._peaks.start_over()
            self.release()
        return _change(before, self.budget)

    def overrun(self) -> str | None:
        """Return in words by how much the peak exceeds the budget, once for each new peak.

        Call it after a batch. It reads the peak on a CPU, whose allocator has no cap, and after a `leave` budget was
        resolved again. In all other cases the allocator raises before the budget is exceeded. On a CPU, the process may
        exceed the budget by a hundredth.
        """
        is_due = self._peaks.is_due() and self.counts_process
        looks, self._has_followed = self._has_followed or is_due, False
        if not looks:
            return None
        peak = read_peak(self.device, **self._elsewhere).bytes
        if peak is None:
            peak = self.reading().reserved.bytes  # MPS before torch 2.13: memory once reserved stays reserved
        allowed = self.bytes * (_NO_TENSORS if self.counts_process else 1)
        if peak is None or not self._peaks.is_new(peak, beside=self.fresh_code_bytes, allowed=allowed):
            return None
        return f"peak {format_bytes(peak)} above the budget of {format_bytes(self.bytes)}"

    def next_peak(self) -> Figure:
        """Return the peak since the counter began, and begin again.

        The peak is None where the counter cannot begin again.
        """
        found = read_peak(self.device, **self._elsewhere)
        if found.bytes is None or not reset_peak(self.device, **self._elsewhere):
            return Figure(None, found.source)
        self._peaks.note(found.bytes)
        return found

    def count_anew(self) -> None:
        """Reset the peak, where the counter allows it, so that it shows the need of a smaller size."""
        if reset_peak(self.device, **self._elsewhere):
            self._peaks.start_over()


def _has_moved(cap: Cap | None, count: int) -> bool:
    """Return whether the allocator needs a new cap to hold `count` bytes."""
    return cap is None or cap.bytes is None or abs(count - cap.bytes) >= _NEW_CAP * cap.bytes


def _change(before: int, budget: Budget) -> str:
    """Return in words how the budget changed from `before` bytes."""
    verb = "fell" if budget.bytes < before else "rose"
    return f"the budget {verb} from {format_bytes(before)} to {format_bytes(budget.bytes)}: {budget.reason}"


def _sources_of(machine: SimulatedMachine | None) -> dict[str, Sources]:
    """Return the sources of hardware readings as keyword arguments; empty for the real machine."""
    return {} if machine is None else {"sources": machine.sources}
