"""The budget of a run: resolve it, cap the allocator, and compare it with the use."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from lightning_unified.cost_model import describe_bytes, metal_heap_bytes, static_bytes
from lightning_unified.errors import BudgetError
from lightning_unified.hardware import (
    Budget,
    BudgetFollower,
    Cap,
    Figure,
    Reading,
    Sources,
    cap_allocator,
    divide_budget,
    prepare_allocators,
    read,
    read_peak,
    reset_peak,
    resolve_budget,
)
from lightning_unified.hardware.host.memory import mmap_threshold, resident_files
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.step.recovery.oom import release_cached_memory
from lightning_unified.units import format_bytes

__all__ = ["BudgetWatch", "refuse_small_budget"]

log = logging.getLogger("lightning_unified")

_NEW_PEAK = 1.1  # a peak is reported again when it is a tenth higher than the last reported one
_WATCH_EVERY = 8  # batches between two looks at the peak on a CPU, after as many looks at the first ones
_NO_TENSORS = (
    1.01  # judgement: a process may exceed its budget by a hundredth beside tensors before a batch is made smaller
)
_NEW_CAP = 0.05  # a cap is handed over anew when it is a twentieth higher or lower


class BudgetWatch:
    """The budget of a run, and its use of memory.

    Args:
        spec: The budget as written: `"auto"`, `"28GiB"`, `"60%"` of the pool, `"leave 6GiB"` for everything else.
        machine: A simulated machine, whose pool it then is while the CPU does the work.

    Attributes:
        device: The device whose pool it is.
        budget: The bytes the spec comes to; None before `resolve`. A `leave` budget becomes another one while a run goes on.
        written: What was written for the allocator to read when it is made; None on a CPU.
        cap: What was done to hold the allocator to the budget.
        sharers: Processes of this run that draw on the same pool, each on an equal part of the budget.
        driver_bytes: What Metal holds for the process beside the allocator's heaps; the allocator counts it against its cap. 0 elsewhere.
    """

    def __init__(self, spec: str | int, machine: SimulatedMachine | None = None) -> None:
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
        self._batches = 0
        self._earlier_peak: int | None = None
        self._told = 0
        self._files = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process; it counts nothing on a simulated machine and follows no other program."""
        return {**vars(self), "_elsewhere": None, "_on_machine": ExitStack(), "_follower": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state over; a simulated machine is the copy's own."""
        vars(self).update(state, _elsewhere=_sources_of(state["machine"]))

    def prepare(self, device: torch.device) -> None:
        """Write the allocator's settings before the device is queried, because a query creates the allocator."""
        device = device if self.machine is None else torch.device(self.machine.device)
        if device.type != "cpu" and (self.written is None or device.type != self.device.type):
            self.written = prepare_allocators(self.spec, **self._elsewhere)
        self.device = device

    def resolve(self) -> None:
        """Find the budget in bytes, and cap the allocator; before anything is allocated on the device.

        Raises:
            BudgetError: If the pool cannot give what was asked for.
        """
        reading = self.reading()
        self.budget = divide_budget(resolve_budget(self.spec, reading), reading, sharers=self.sharers)
        self.cap = cap_allocator(self.device, self.budget, **self._elsewhere)
        if self.device.type == "mps":
            self.release()
            held = self.reading()
            self.driver_bytes = max((held.reserved.bytes or 0) - (held.allocated.bytes or 0), 0)
        if self.cap.warning is not None:
            log.warning("The cap of %s stands, but %s.", format_bytes(self.cap.bytes), self.named(self.cap.warning))

    def enter(self, module: torch.nn.Module) -> None:
        """Count on the simulated machine, if there is one, what `module` has and what is made until `leave`."""
        self.leave()
        if self.machine is not None:
            self._on_machine.enter_context(self.machine.active(holding=[*module.parameters(), *module.buffers()]))

    def leave(self) -> None:
        """Give the simulated device up; its peak stays known."""
        self._on_machine.close()
        if self.machine is not None:
            self.machine.forget()

    def release(self) -> None:
        """Release cached memory; call it outside any `except` block."""
        release_cached_memory(self.device, **self._elsewhere)

    def named(self, reason: str) -> str:
        """Return `reason`, and before it the simulated machine that it is true of."""
        return reason if self.machine is None else f"simulated {self.machine.profile.name}: {reason}"

    def begin(self) -> None:
        """Count the peak from here on, and follow other programs if the budget does."""
        reset_peak(self.device, **self._elsewhere)
        self._files = self._resident_files()
        self._follower = None if self.budget is None else BudgetFollower(self.budget)
        self._has_followed = False
        self._batches = self._told = 0
        self._earlier_peak = None

    @property
    def counts_process(self) -> bool:
        """Whether the pool's counters are of the whole process, as on a CPU, and not of tensors alone."""
        return self.device.type == "cpu"

    @property
    def mmap_threshold(self) -> int | None:
        """The bytes from which the C library was told to map blocks one by one; None where it was not, and where tensors are elsewhere."""
        return mmap_threshold(self._sources) if self.counts_process else None

    @property
    def _sources(self) -> Sources:
        return self._elsewhere.get("sources") or Sources.live()

    @property
    def fresh_code_bytes(self) -> int:
        """Resident bytes of files, of code that ran for the first time above all, that came in since `begin`; 0 but on a CPU.

        They are not held against the budget, though the counters have them: the system drops them when it is short.
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
        """Return the bytes that the process could hold altogether now within its budget; None if unknown."""
        now = self.reading()
        if now.available.bytes is None:
            return None
        return min(self.bytes, now.available.bytes + (now.allocated.bytes or 0))

    def measured_peak(self) -> Figure:
        """Return the highest use of this fit so far, in bytes, and which counter says so."""
        now = read_peak(self.device, **self._elsewhere)
        if now.bytes is None or self._earlier_peak is None or now.bytes >= self._earlier_peak:
            return now
        return Figure(self._earlier_peak, now.source)

    def follow(self) -> str | None:
        """Between two batches: resolve a `leave` budget anew, if it is time to; return in words how it changed.

        The cap follows, but never below what the run has just held: it would fail where it could be made smaller. Once it is
        smaller, the cap comes down after it. What a lower budget sets free goes back to the system at once.
        """
        follower = self._follower
        if follower is None or not follower.due:
            return None
        self._has_followed = True
        before, reading = self.bytes, self.reading()
        has_changed = follower.follow(reading)
        self.budget = follower.budget
        self._cap_at(max(self.bytes, reading.reserved.bytes or 0, reading.peak.bytes or 0))
        if not has_changed:
            return None
        if self.bytes < before:
            self._told = 0
            self.release()
        verb = "fell" if self.bytes < before else "rose"
        return f"the budget {verb} from {format_bytes(before)} to {format_bytes(self.bytes)}: {self.budget.reason}"

    def _cap_at(self, count: int) -> None:
        stands = None if self.cap is None else self.cap.bytes
        if self.device.type != "cpu" and (stands is None or abs(count - stands) >= _NEW_CAP * stands):
            assert self.budget is not None
            self.cap = cap_allocator(self.device, replace(self.budget, bytes=count), **self._elsewhere)

    def overrun(self) -> str | None:
        """After a batch: return in words by how much its peak is above the budget, once for each new peak.

        On a CPU, whose allocator has no cap, and whenever a budget that follows other programs was read anew; else the allocator
        raises before it gets there. Of a process a hundredth more is let pass.
        """
        self._batches += 1
        is_time = self._batches <= _WATCH_EVERY or self._batches % _WATCH_EVERY == 0
        looks, self._has_followed = self._has_followed or (self.device.type == "cpu" and is_time), False
        if not looks:
            return None
        peak = read_peak(self.device, **self._elsewhere).bytes
        if peak is None:
            peak = self.reading().reserved.bytes  # MPS before torch 2.13: memory once reserved stays reserved
        allowed = self.bytes * (_NO_TENSORS if self.counts_process else 1)
        if peak is None or peak - self.fresh_code_bytes <= max(allowed, _NEW_PEAK * self._told):
            return None
        self._earlier_peak, self._told = max(peak, self._earlier_peak or 0), peak
        return f"peak {format_bytes(peak)} above the budget of {format_bytes(self.bytes)}"

    def count_anew(self) -> None:
        """Let the peak show what a smaller size needs, where the counter can be set back."""
        if reset_peak(self.device, **self._elsewhere):
            self._told = 0


def _sources_of(machine: SimulatedMachine | None) -> dict[str, Sources]:
    """Return where hardware is read, as keyword arguments: nothing for the machine this runs on."""
    return {} if machine is None else {"sources": machine.sources}


def refuse_small_budget(
    watch: BudgetWatch, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise `BudgetError` if the budget cannot hold weights, gradients and optimizer state, before any activation.

    Args:
        watch: The budget; nothing is refused before it is resolved.
        module: The module to train.
        optimizers: Its optimizers; empty before they exist.
    """
    need, budget = static_bytes(module, optimizers), watch.budget
    if budget is None:
        return
    given = f"a budget of {format_bytes(budget.bytes)} ({budget.spec}) cannot hold {type(module).__name__}"
    if sum(need.values()) > budget.bytes:
        raise BudgetError(
            f"{given}: {describe_bytes(need)}, "
            f"before any activation. Give a budget well above {format_bytes(sum(need.values()))}, or train a smaller model."
        )
    heaps = metal_heap_bytes(module) if watch.device.type == "mps" else 0
    if heaps > budget.bytes:
        raise BudgetError(
            f"{given}: Metal keeps its weights of {format_bytes(need['weights'])} in heaps of {format_bytes(heaps)} together, one of 1 GiB "
            f"for tensors of 10 MiB and more. Give a budget well above {format_bytes(heaps)}, or train a smaller model."
        )
