"""What a step will last: its operations at the rates of a machine."""

from collections.abc import Callable, Sequence

from lightning_unified.planning.rates.record import Rates
from lightning_unified.planning.trace import Trace, Work

__all__ = ["cut_seconds", "step_seconds"]

_OUTSIDE = ("setup", "validation")
"""Phases that are no part of a training step."""

_REPEATED = ("forward", "backward")
"""Phases that every micro-batch goes through."""

_Loads = dict[tuple[str, str], float]
"""Seconds by who is busy (`"host"`, `"device"`) and phase."""


def step_seconds(trace: Trace, rates: Rates) -> float:
    """Return the seconds that a step is predicted to last.

    A GPU works through what the host has put in its queue, so a phase lasts as long as the busier of the two: the host, which needs
    `rates.launch` for each operation, or the device, which needs the time of its kernels. A CPU is both, one after the other. The
    optimizer's kernels (fused, foreach, a loop) differ by their operations and the bytes these move, and by nothing else.

    Args:
        trace: Of the step, with all its micro-batches.
        rates: Of the machine.
    """
    return _seconds(_loads(trace, rates), backend=trace.backend)


def cut_seconds(at: Callable[[int, int], Trace], sizes: Sequence[int], rates: Rates) -> float:
    """Return the seconds of a step whose batch is cut into micro-batches of `sizes` rows.

    Forward and backward passes of a step of two micro-batches are those of two; the rest of it is there once, however many there are.
    What the device does falls with the rows of smaller micro-batches, what the host does for each does not.

    Args:
        at: The trace of a step by rows of a micro-batch and number of micro-batches.
        sizes: Rows of each micro-batch, the largest first.
        rates: Of the machine.
    """
    if len(sizes) == 1:
        return step_seconds(at(sizes[0], 1), rates)
    trace = at(sizes[0], 2)
    micro_batches = {"host": len(sizes) / 2, "device": sum(sizes) / (2 * sizes[0])}
    total = {
        (who, phase): seconds * (micro_batches[who] if phase in _REPEATED else 1)
        for (who, phase), seconds in _loads(trace, rates).items()
    }
    return _seconds(total, backend=trace.backend)


def _loads(trace: Trace, rates: Rates) -> _Loads:
    loads: _Loads = {("host", "forward"): rates.part * trace.parts}
    for event in trace.events:
        if isinstance(event, Work) and event.phase not in _OUTSIDE:
            host, device = ("host", event.phase), ("device", event.phase)
            dtype = "tf32" if _is_tf32(event, trace.backend) else event.dtype
            kernel = rates.kernel_seconds(flops=event.flops, moved=event.moved, dtype=dtype)
            loads[host] = loads.get(host, 0.0) + rates.launch
            loads[device] = loads.get(device, 0.0) + kernel
    return loads


def _is_tf32(work: Work, backend: str) -> bool:
    """Return whether cuDNN multiplies it as TF32, as it does unless `torch.backends.cudnn.allow_tf32` is switched off."""
    return backend == "cuda" and work.dtype == "float32" and "convolution" in work.op


def _seconds(loads: _Loads, *, backend: str) -> float:
    if backend == "cpu":
        return sum(loads.values())
    phases = {phase for _, phase in loads}
    return sum(max(loads.get(("host", phase), 0.0), loads.get(("device", phase), 0.0)) for phase in phases)
