"""What a step will last: its operations at the rates of a machine."""

from collections.abc import Callable, Sequence

from lightning_unified.cost_model.rates.record import Rates
from lightning_unified.cost_model.trace.trace import Trace, Work

__all__ = ["least_seconds", "split_seconds", "step_seconds"]

_OUTSIDE = ("setup", "validation")
"""Phases that are no part of a training step."""

_REPEATED = ("forward", "backward")
"""Phases that every micro-batch goes through."""

_AGAIN = 0.9
"""Judgement: of a block's operations, the share that runs again at least; what its backward pass has no use for does not."""

_WATCHED = 2.5
"""Launches that an operation costs the host besides while attention is kept: torch asks Python about each (`TorchDispatchMode`).

Source: narrow layers under a mode that does nothing, torch 2.13: 14.5 µs an operation instead of 4.2.
"""

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


def split_seconds(at: Callable[[int, int], Trace], sizes: Sequence[int], rates: Rates) -> float:
    """Return the seconds of a step whose batch is cut into micro-batches of `sizes` rows.

    Forward and backward passes of a step of two micro-batches are those of two; the rest of it is there once, however many there are.
    What the device does falls with the rows of smaller micro-batches, what the host does for each does not.

    Args:
        at: The trace of a step by rows of a micro-batch and number of micro-batches.
        sizes: Rows of each micro-batch, the largest first.
        rates: Of the machine.
    """
    trace = at(sizes[0], min(len(sizes), 2))
    return _seconds(_cut(_loads(trace, rates), sizes), backend=trace.backend)


def least_seconds(
    at: Callable[[int, int], Trace],
    sizes: Sequence[int],
    rates: Rates,
    *,
    again: Callable[[Work], bool],
    optimizer: bool = True,
) -> Callable[[int], float]:
    """Return what tells, by the number of its micro-batches, the seconds that a step takes at least which runs some operations of another one again, and is as that one
    elsewhere. Each micro-batch starts its operations and kernels anew.

    Args:
        at: The other step, as for `split_seconds`.
        sizes: Rows of each micro-batch of it.
        rates: Of the machine.
        again: Whether an operation of its forward pass runs again in the backward pass.
        optimizer: Whether the optimizer runs as in it; if not, nothing is counted for it.
    """
    trace = at(sizes[0], min(len(sizes), 2))
    loads = _loads(trace, rates)
    for event in trace.events:
        if isinstance(event, Work) and event.phase == "forward" and again(event):
            _add(loads, event, "backward", rates, share=_AGAIN, backend=trace.backend)
    left = {key: seconds for key, seconds in loads.items() if optimizer or key[1] != "optimizer step"}
    fewest, starts = _cut(left, sizes), _cut(_starts(trace, rates, again=again), sizes)

    def least(parts: int) -> float:
        more = parts / len(sizes) - 1
        cut = {key: seconds + more * starts.get(key, 0.0) for key, seconds in fewest.items()}
        return _seconds(cut, backend=trace.backend)

    return least


def _starts(trace: Trace, rates: Rates, *, again: Callable[[Work], bool]) -> _Loads:
    """Return what of the loads is there for each micro-batch, however few rows it has."""
    loads: _Loads = {("host", "forward"): rates.part * trace.parts}
    for event in trace.events:
        if not isinstance(event, Work) or event.phase not in _REPEATED:
            continue
        kernel = rates.kernel if event.flops or event.moved else 0.0
        shares = {event.phase: 1.0}
        if event.phase == "forward" and again(event):
            shares["backward"] = _AGAIN
        for phase, share in shares.items():
            for key, seconds in ((("host", phase), rates.launch), (("device", phase), kernel)):
                loads[key] = loads.get(key, 0.0) + share * seconds
    return loads


def _cut(loads: _Loads, sizes: Sequence[int]) -> _Loads:
    """Return the loads of a batch cut into `sizes`, from those of one micro-batch if that is all, else of two."""
    if len(sizes) == 1:
        return loads
    micro_batches = {"host": len(sizes) / 2, "device": sum(sizes) / (2 * sizes[0])}
    return {
        (who, phase): seconds * (micro_batches[who] if phase in _REPEATED else 1)
        for (who, phase), seconds in loads.items()
    }


def _loads(trace: Trace, rates: Rates) -> _Loads:
    loads: _Loads = {("host", "forward"): rates.part * trace.parts}
    watched = _WATCHED * rates.launch if "attention kept" in trace.options.get("recompute", "") else 0.0
    for event in trace.events:
        if not isinstance(event, Work) or event.phase in _OUTSIDE:
            continue
        _add(loads, event, event.phase, rates, share=1.0, backend=trace.backend)
        if event.phase == "forward":  # and what runs again of it in the backward pass
            for phase in _REPEATED:
                loads["host", phase] = loads.get(("host", phase), 0.0) + watched
    return loads


def _add(loads: _Loads, work: Work, phase: str, rates: Rates, *, share: float, backend: str) -> None:
    """Add what an operation costs in a phase, or a share of it."""
    host, device = ("host", phase), ("device", phase)
    dtype = "tf32" if _is_tf32(work, backend) else work.dtype
    kernel = rates.kernel_seconds(flops=work.flops, moved=work.moved, dtype=dtype)
    loads[host] = loads.get(host, 0.0) + share * rates.launch
    loads[device] = loads.get(device, 0.0) + share * kernel


def _is_tf32(work: Work, backend: str) -> bool:
    """Return whether cuDNN multiplies it as TF32, as it does unless `torch.backends.cudnn.allow_tf32` is switched off."""
    return backend == "cuda" and work.dtype == "float32" and "convolution" in work.op


def _seconds(loads: _Loads, *, backend: str) -> float:
    if backend == "cpu":
        return sum(loads.values())
    phases = {phase for _, phase in loads}
    return sum(max(loads.get(("host", phase), 0.0), loads.get(("device", phase), 0.0)) for phase in phases)
