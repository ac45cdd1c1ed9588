"""Turn the trace of a step into the `Prediction` that plans, tables and reports show."""

from lightning_unified.cost_model.memory.peak import describe_instant, instants, peak
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.trace.trace import Trace

__all__ = ["ROUNDING", "summarise"]

# Multiple of bytes to which each backend rounds a tensor. The CPU's counter does not round; Metal's multiple is judgement.
ROUNDING = {"cuda": 512, "rocm": 512, "mps": 256, "cpu": 1}


def summarise(
    trace: Trace,
    *,
    seconds: float | None = None,
    planning_seconds: float = 0.0,
    expandable_segments: bool = False,
    mmap_threshold: int | None = None,
) -> Prediction:
    """Return the prediction that follows from the trace of a step.

    On a GPU the peak counts the allocator's blocks, because device counters do. A block of CUDA's large pool keeps up to 1
    MiB more than its tensor needs. Metal reuses freed blocks whole (`m_current_allocated_memory` in torch's MPSAllocator.mm).
    On a CPU the peak counts the tensors.

    Args:
        trace: A step in steady state, at the size in question.
        seconds: Predicted seconds of the step; None if the device's speed is unknown.
        planning_seconds: Seconds the prediction took.
        expandable_segments: Whether CUDA's allocator uses expandable segments.
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if the user set it; None models the C library's moving
            threshold.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    replayed = allocator_peak(trace, expandable_segments=expandable_segments, mmap_threshold=mmap_threshold)
    rounding = ROUNDING[trace.backend]
    if trace.backend != "cpu":
        count, categories, instant = replayed.allocated, replayed.categories, describe_instant(trace, replayed.index)
    else:
        most = peak(trace, rounding=rounding)
        count, categories, instant = most.bytes, most.categories, most.instant
    return Prediction(
        peak_bytes=count,
        reserved_bytes=max(replayed.reserved, count),
        categories=categories,
        confidence=trace.confidence,
        seconds=seconds,
        instant=instant,
        rows=trace.rows,
        parts=trace.parts,
        instants=instants(trace, rounding=rounding),
        planning_seconds=planning_seconds,
        notes=trace.notes,
    )
