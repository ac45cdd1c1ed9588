"""What a trace says of a step, as the record that plans, tables and reports show."""

from lightning_unified.cost_model.memory.peak import describe_instant, instants, peak
from lightning_unified.cost_model.memory.reserve import held
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.trace.trace import Trace

__all__ = ["ROUNDING", "summarise"]

# To what each backend rounds a tensor's bytes; what was asked for is what counts on a CPU, and Metal's is judgement.
ROUNDING = {"cuda": 512, "rocm": 512, "mps": 256, "cpu": 1}


def summarise(
    trace: Trace,
    *,
    seconds: float | None = None,
    planning_seconds: float = 0.0,
    expandable_segments: bool = False,
    mmap_threshold: int | None = None,
) -> Prediction:
    """Return the prediction that follows from a step's trace.

    The peak is that of the allocator's blocks, which is what devices count: a block of CUDA's large pool keeps up to 1 MiB more than its
    tensor needs, and Metal's are used again whole (`m_current_allocated_memory` in torch's MPSAllocator.mm). On a CPU it is that of the
    tensors.

    Args:
        trace: A step in steady state, of the size that is asked about.
        seconds: What it is predicted to last; None where nothing is known of the device's speed.
        planning_seconds: What the prediction took.
        expandable_segments: Whether CUDA's allocator was told to use segments that grow.
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if it was set; None is the C library's own, which moves.

    Raises:
        ValueError: If the trace is of a backend whose allocator is unknown.
    """
    replayed = held(trace, expandable_segments=expandable_segments, mmap_threshold=mmap_threshold)
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
