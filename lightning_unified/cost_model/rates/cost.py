"""Predict the seconds of a step: the operations of its trace at the rates of a machine.

A GPU works off a queue that the host fills. In each phase the slower of the two decides:

    seconds(phase) = max(host: launch · operations, device: Σ kernel + max(flops / rate, bytes / bandwidth))

A CUDA graph launches all operations of a recorded module with one call.

A CPU is host and device in one, so its times add up. A split batch repeats the forward and backward phases: host time grows
with the number of micro-batches, device time with the rows.

With several ranks, each collective operation takes `latency + bytes sent / bandwidth` of the link (`links.py`). FSDP transfers while
the device computes, so the link is a third processor of its phase: on a GPU the slowest of the three decides. This is the best case:
the first gather of a step, which nothing overlaps, counts as overlapped. A reduction after the last backward pass, as `unified_ddp`
runs it, overlaps nothing, and its seconds add up. On a CPU all add up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_unified.cost_model.rates.links import Link
from lightning_unified.cost_model.rates.record import Rates
from lightning_unified.cost_model.trace.trace import Collective, Passes, Trace, Work

__all__ = ["communication", "least_seconds", "sampling_seconds", "split_seconds", "step_seconds", "waiting_seconds"]

_OUTSIDE = ("setup", "validation")
"""Phases outside a training step."""

_REPEATED = ("forward", "backward")
"""Phases that every micro-batch repeats."""

_AGAIN = 0.9
"""Judgement: least share of a checkpointed block's operations that is recomputed.

Operations that the backward pass does not need are not recomputed.
"""

_WATCHED = 2.5
"""Extra launches that an operation costs the host while attention outputs are saved.

torch calls Python for each operation (`TorchDispatchMode`).
Source: narrow layers under a mode that does nothing, torch 2.13: 14.5 µs an operation instead of 4.2.
"""

_CHECKPOINTED = 90
"""Launches that a block costs the host if it runs again, besides its operations.

torch calls Python for each tensor that the block saves, when it is saved and when it is read.
Source: benchmarks/cost_model/host_time.py measures 94 for eager blocks, and 72 for compiled ones.
"""

_REPLAYED = 50
"""Judgement: launches that a replayed call costs the host in each pass.

It walks through the module's state, copies inputs and outputs, and launches a graph of up to thousands of kernels.
"""

_ACCUMULATES = "aten.add_.Tensor"
"""Adds a parameter's gradient to that of earlier micro-batches."""

_SUMS = "lightning_unified.add_product.default"
"""Multiplies matrices and adds to a sum in place.

It reads and writes the sum after it has multiplied, not meanwhile.
Source: benchmarks/options/loss/chunked_loss.json as recorded on 23 November 2026, where each further chunk took 116 µs for a sum of 155 MB. The
host of the newer record launches more slowly, which hides it.
"""

_Column = np.ndarray[Any, np.dtype[np.float64]]

_Loads = dict[tuple[str, str], float]
"""Busy seconds by processor and phase.

Processors are `"host"`, `"device"`, `"link"`, and `"exposed"` for a link that nothing overlaps.
"""


def step_seconds(trace: Trace, rates: Rates) -> float:
    """Return the predicted seconds of a step.

    On a GPU a phase lasts as long as its slower side: the host, with `rates.launch` for each operation, or the device, with
    the time of its kernels. On a CPU both add up. Optimizer kernels (fused, foreach, for-loop) differ only by their
    operations and the bytes these move.
    """
    return _seconds(_loads(trace, rates), backend=trace.backend)


def communication(trace: Trace, link: Link | None, *, num_micro_batches: int) -> tuple[int, float | None]:
    """Return the bytes that a device sends in a step, and the seconds that its link is busy.

    These seconds count overlapped or not. The seconds are None without a link.

    Args:
        trace: A step of one or two micro-batches.
        link: The link to the other devices.
        num_micro_batches: Micro-batches of the step.
    """
    times = {phase: max(num_micro_batches / trace.num_micro_batches, 1.0) for phase in _REPEATED}
    found = [event for event in trace.events if isinstance(event, Collective)]
    sent = sum(int(event.sent * times.get(event.phase, 1.0)) for event in found)
    if link is None:
        return sent, None
    return sent, sum(link.seconds(event.sent) * times.get(event.phase, 1.0) for event in found)


def sampling_seconds(trace: Trace, rates: Rates) -> float:
    """Return the seconds of sampling before the step, which `step_seconds` includes; 0 without sampling."""
    sampled = {key: seconds for key, seconds in _loads(trace, rates).items() if key[1] == "sampling"}
    return _seconds(sampled, backend=trace.backend)


def split_seconds(at: Callable[[int, int], Trace], sizes: Sequence[int], rates: Rates) -> float:
    """Return the predicted seconds of a step whose batch is split into micro-batches of `sizes` rows.

    The forward and backward times come from a step of two micro-batches; all other phases run once. Device time falls with
    the rows of smaller micro-batches, host time does not.

    Args:
        at: Function that returns the trace of a step, given rows of a micro-batch and number of micro-batches.
        sizes: Rows of each micro-batch, the largest first.
        rates: Speeds of the machine.
    """
    trace = at(sizes[0], min(len(sizes), 2))
    return _seconds(_split(_loads(trace, rates), sizes), backend=trace.backend)


def waiting_seconds(at: Callable[[int, int], Trace], sizes: Sequence[int], rates: Rates) -> float:
    """Return the predicted seconds of a step in which a GPU waits for the host.

    On a CPU they are 0. The arguments are those of `split_seconds`.
    """
    trace = at(sizes[0], min(len(sizes), 2))
    if trace.backend == "cpu":
        return 0.0
    loads = _split(_loads(trace, rates), sizes)
    without = {(who, phase): seconds for (who, phase), seconds in loads.items() if who != "host"}
    return _seconds(loads, backend=trace.backend) - _seconds(without, backend=trace.backend)


def least_seconds(
    at: Callable[[int, int], Trace],
    sizes: Sequence[int],
    rates: Rates,
    *,
    again: Callable[[Work], bool],
    counts: Callable[[Work], bool] = lambda _: True,
    optimizer: bool = True,
) -> Callable[[int], float]:
    """Return a function that bounds the step time from below, given the number of micro-batches.

    The bound is for a step that recomputes some operations of a traced step and otherwise has at least those that count. Each further
    micro-batch adds its launches and kernel starts.

    Args:
        at: Function that returns the traced step, as for `split_seconds`.
        sizes: Rows of each micro-batch of the traced step.
        rates: Speeds of the machine.
        again: Returns whether an operation of the forward pass is recomputed in the backward pass.
        counts: Returns whether an operation of the forward or backward pass is part of the other step too.
        optimizer: Whether the optimizer runs as in the traced step; if not, it counts as 0 seconds.
    """
    trace = at(sizes[0], min(len(sizes), 2))
    loads, starts = _least_loads(trace, rates, again=again, counts=counts)
    left = {key: seconds for key, seconds in loads.items() if optimizer or key[1] != "optimizer step"}
    fewest, starts = _split(left, sizes), _split(starts, sizes)

    def least(num_micro_batches: int) -> float:
        more = num_micro_batches / len(sizes) - 1
        split = {key: seconds + more * starts.get(key, 0.0) for key, seconds in fewest.items()}
        return _seconds(split, backend=trace.backend)

    return least


@dataclass(frozen=True, slots=True)
class _Repeated:
    """The operations that every micro-batch repeats, with their seconds as arrays in the order of the step.

    One operation stands for all of its kind in its module.

    Attributes:
        works: The operations.
        seconds: The seconds of `"host"` and `"device"`.
        kernels: The device's seconds to start the kernels.
        is_forward: Whether an operation belongs to the forward pass.
        may_recompute: Whether it may run again in the backward pass. Weights are not gathered again.
    """

    works: list[Work]
    seconds: dict[str, _Column]
    kernels: _Column
    is_forward: "np.ndarray[Any, np.dtype[np.bool_]]"
    may_recompute: "np.ndarray[Any, np.dtype[np.bool_]]"


def _least_loads(
    trace: Trace, rates: Rates, *, again: Callable[[Work], bool], counts: Callable[[Work], bool]
) -> tuple[_Loads, _Loads]:
    """Return the loads of a step that recomputes some operations, and those that each micro-batch adds.

    A micro-batch adds the latter however few rows it has.
    """
    found = _repeated(trace, rates)
    counted = np.fromiter(map(counts, found.works), bool, len(found.works))
    rerun = counted & found.may_recompute & np.fromiter(map(again, found.works), bool, len(found.works))
    loads, starts = _loads(trace, rates), {("host", "forward"): rates.part * trace.num_micro_batches}
    for who, seconds in found.seconds.items():
        begun = seconds if who == "host" else found.kernels
        for phase in _REPEATED:
            own = found.is_forward if phase == "forward" else ~found.is_forward
            repeats = rerun if phase == "backward" else np.False_
            left_out = np.where(own & ~counted, -seconds, np.where(repeats, _AGAIN * seconds, 0.0))
            added = np.where(own & counted, begun, np.where(repeats, _AGAIN * begun, 0.0))
            loads[who, phase] = _summed(loads.get((who, phase), 0.0), left_out)
            starts[who, phase] = _summed(starts.get((who, phase), 0.0), added)
    return loads, starts


def _summed(first: float, others: _Column) -> float:
    """Return the sum of numbers, added one after another: `sum` of an array adds them in another order."""
    return float(np.add.accumulate(np.concatenate(([first], others)))[-1])


def _repeated(trace: Trace, rates: Rates) -> _Repeated:
    """Return the operations that every micro-batch repeats; found once for a trace."""
    kept = trace.kept.get("repeated")
    if kept is None or kept[0] is not rates:
        costs = _Costs(rates, trace)
        found: dict[tuple[Any, ...], tuple[Work, list[float]]] = {}
        for work in trace.events:
            if not isinstance(work, Work) or work.phase not in _REPEATED:
                continue
            kind = type(work), work.place, work.op, work.phase, work.flops > 0
            sums = found.setdefault(kind, (work, [0.0, 0.0, 0.0]))[1]
            host, device = costs.of(work)
            sums[0] += host
            sums[1] += device
            kernels = work.kernels if isinstance(work, Passes) else 1
            sums[2] += kernels * rates.kernel if work.flops or work.moved else 0.0
        kept = trace.kept["repeated"] = rates, _in_arrays(list(found.values()))
    return kept[1]


def _in_arrays(found: Sequence[tuple[Work, Sequence[float]]]) -> _Repeated:
    works = [work for work, _ in found]
    host, device, kernels = np.array([sums for _, sums in found]).reshape(-1, 3).T
    is_forward = np.array([work.phase == "forward" for work in works], dtype=bool)
    gathers = np.array([isinstance(work, Collective) for work in works], dtype=bool)
    return _Repeated(works, {"host": host, "device": device}, kernels, is_forward, is_forward & ~gathers)


def _load(loads: _Loads, phase: str, host: float, device: float) -> None:
    """Add busy seconds to a phase."""
    loads["host", phase] = loads.get(("host", phase), 0.0) + host
    loads["device", phase] = loads.get(("device", phase), 0.0) + device


def _split(loads: _Loads, sizes: Sequence[int]) -> _Loads:
    """Return the loads of a batch split into `sizes`, from those of one or two micro-batches."""
    if len(sizes) == 1:
        return loads
    times = len(sizes) / 2
    micro_batches = {"host": times, "link": times, "exposed": times, "device": sum(sizes) / (2 * sizes[0])}
    return {
        (who, phase): seconds * (micro_batches[who] if phase in _REPEATED else 1)
        for (who, phase), seconds in loads.items()
    }


def _loads(trace: Trace, rates: Rates) -> _Loads:
    """Return the loads of a traced step, which are computed once for a trace."""
    kept = trace.kept.get("loads")
    if kept is None or kept[0] is not rates:
        kept = trace.kept["loads"] = rates, _added_up(trace, rates)
    return dict(kept[1])


def _added_up(trace: Trace, rates: Rates) -> _Loads:
    replays = _REPLAYED * rates.launch * len(trace.replayed)
    again = 0.0 if trace.replayed else _CHECKPOINTED * rates.launch * trace.recomputed_blocks
    loads: _Loads = {
        ("host", "forward"): (rates.part + replays) * trace.num_micro_batches,
        ("host", "backward"): (again + replays) * trace.num_micro_batches,
    }
    watched = _WATCHED * rates.launch if "attention kept" in trace.options.get("recompute", "") else 0.0
    costs = _Costs(rates, trace)
    for event in trace.events:
        if not isinstance(event, Work) or event.phase in _OUTSIDE:
            continue
        _load(loads, event.phase, *costs.of(event))
        if isinstance(event, Collective):
            link = ("link" if event.overlaps else "exposed"), event.phase
            loads[link] = loads.get(link, 0.0) + rates.link_seconds(event.sent)
        if watched and event.phase == "forward":  # its recomputation in the backward pass costs the same
            for phase in _REPEATED:
                loads["host", phase] = loads.get(("host", phase), 0.0) + watched
    return loads


class _Costs:
    """The costs of operations, computed once for each object: many events are one object."""

    def __init__(self, rates: Rates, trace: Trace) -> None:
        self._rates, self._backend, self._trace = rates, trace.backend, trace
        self._known: dict[int, tuple[float, float]] = {}

    def of(self, work: Work) -> tuple[float, float]:
        """Return the busy seconds of host and device for an operation of a trace that lives."""
        cost = self._known.get(id(work))
        if cost is None:
            host, device = _cost(work, self._rates, backend=self._backend)
            cost = self._known[id(work)] = 0.0 if self._is_launched_by_a_graph(work) else host, device
        return cost

    def _is_launched_by_a_graph(self, work: Work) -> bool:
        sums = bool(self._trace.replayed) and work.op == _ACCUMULATES and not work.place
        return (sums and work.phase in _REPEATED) or self._trace.is_replayed(work)


def _cost(work: Work, rates: Rates, *, backend: str) -> tuple[float, float]:
    """Return the busy seconds of host and device for an operation."""
    dtype = "tf32" if _is_tf32(work, backend) else work.dtype
    beside, after = (0, work.moved) if work.op == _SUMS else (work.moved, 0)
    kernel = rates.kernel_seconds(flops=work.flops, moved=beside, dtype=dtype) + after / rates.bandwidth
    if not isinstance(work, Passes):
        return rates.launch, kernel
    return work.launches * rates.launch, kernel + max(work.kernels - 1, 0) * rates.kernel


def _is_tf32(work: Work, backend: str) -> bool:
    """Return whether cuDNN computes the operation as TF32.

    It does unless `torch.backends.cudnn.allow_tf32` is switched off.
    """
    return backend == "cuda" and work.dtype == "float32" and "convolution" in work.op


def _seconds(loads: _Loads, *, backend: str) -> float:
    if backend == "cpu":
        return sum(loads.values())
    phases = dict.fromkeys(phase for _, phase in loads)
    overlapped = ("host", "device", "link")
    return sum(
        max(loads.get((who, phase), 0.0) for who in overlapped) + loads.get(("exposed", phase), 0.0) for phase in phases
    )
