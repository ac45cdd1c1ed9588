"""The predicted memory and time of a step, made from its trace."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_unified.cost_model.memory.peak import Peak, describe_instant, instants, peak
from lightning_unified.cost_model.memory.reserve import AllocatorPeak, allocator_peak
from lightning_unified.cost_model.printed import Printed
from lightning_unified.cost_model.trace.trace import Category, Confidence, Trace
from lightning_unified.hardware.allocators.settings import AllocatorSettings

__all__ = ["Prediction", "counted_peak", "summarise"]

_UNROUNDED = 1  # the CPU's counter counts the bytes of tensors
_DEFAULT = AllocatorSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction(Printed):
    """Predicted peak of one step, its categories and its instant; `print` shows them as tables.

    Attributes:
        peak_bytes: Peak of live tensor bytes, library workspaces included; comparable with `max_memory_allocated`.
        reserved_bytes: Peak of bytes that the allocator reserves on the device; on a CPU the growth of the process.
        categories: `peak_bytes` by category at the instant of the peak.
        confidence: `"high"`, `"medium"` (made-up values decided no shape) or `"low"` (a made-up value can decide a shape; run
            a batch-size probe instead).
        seconds: Predicted seconds of the step; None if the device's speed is unknown.
        instant: Place of the peak in the step, in words: phase, module and operation.
        instants: Peak of each place in the order of the step, as pairs of words and bytes.
        rows: Rows of the micro-batch the prediction is for.
        num_micro_batches: Number of micro-batches in the step.
        planning_seconds: Seconds the prediction took.
        notes: Assumptions, and effects the dry run cannot see.
        validation: Prediction of a validation step in the middle of the same fit; None if not requested.
        generation_bytes: Peak of the generation that precedes the step, by formula, with gradients and optimizer state beside
            it; 0 without generation.
        generation_seconds: Seconds of that generation, by formula; part of `seconds`.
        devices: Number of devices that train together; every figure is that of one of them.
        strategy: `"unified_ddp"`, `"unified_fsdp"` or `"fsdp"` for several devices; empty for one.
        sent_bytes: Bytes that the device sends to the others in a step.
        link_seconds: Seconds that its link is busy in a step, overlapped or not; None for one device.
    """

    peak_bytes: int
    reserved_bytes: int
    categories: Mapping[Category, int]
    confidence: Confidence
    seconds: float | None
    instant: str
    rows: int
    num_micro_batches: int = 1
    instants: tuple[tuple[str, int], ...] = ()
    planning_seconds: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)
    validation: "Prediction | None" = None
    generation_bytes: int = 0
    generation_seconds: float = 0.0
    devices: int = 1
    strategy: str = ""
    sent_bytes: int = 0
    link_seconds: float | None = None

    @property
    def step_bytes(self) -> int:
        """Peak of the whole step: the larger of generation and of the step itself."""
        return max(self.reserved_bytes, self.generation_bytes)

    def within(self, limit: int) -> "Prediction":
        """Return the prediction of a step that fits within `limit` bytes.

        At its limit an allocator frees its caches, so that it reserves no more than that.
        """
        return replace(self, reserved_bytes=min(self.reserved_bytes, max(limit, self.peak_bytes)))


def counted_peak(trace: Trace, replayed: AllocatorPeak) -> Peak:
    """Return the peak of a step as the device's counter shows it.

    On a GPU the peak counts the allocator's blocks, because device counters do. A block of CUDA's large pool keeps up to 1
    MiB more than its tensor needs. So does one of Metal's from torch 2.14 on; before, a freed block is reused whole
    (`m_current_allocated_memory` in torch's MPSAllocator.mm). On a CPU the peak counts the tensors.
    """
    if trace.backend == "cpu":
        return peak(trace, rounding=_UNROUNDED)
    return Peak(
        bytes=replayed.allocated,
        categories=replayed.categories,
        index=replayed.index,
        instant=describe_instant(trace, replayed.index),
    )


def summarise(
    trace: Trace,
    *,
    seconds: float | None = None,
    generation_seconds: float = 0.0,
    planning_seconds: float = 0.0,
    settings: AllocatorSettings = _DEFAULT,
) -> Prediction:
    """Return the prediction that follows from the trace of a step; `counted_peak` is its peak.

    Args:
        trace: A step in steady state, at the size in question.
        seconds: Predicted seconds of the step; None if the device's speed is unknown.
        generation_seconds: Seconds of the generation before the step, which `seconds` includes.
        planning_seconds: Seconds the prediction took.
        settings: Settings of the allocator.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    replayed = allocator_peak(trace, settings=settings)
    most = counted_peak(trace, replayed)
    is_cpu = trace.backend == "cpu"
    return Prediction(
        peak_bytes=most.bytes,
        reserved_bytes=max(replayed.reserved, most.bytes),
        categories=most.categories,
        confidence=trace.confidence,
        seconds=seconds,
        generation_seconds=generation_seconds,
        instant=most.instant,
        rows=trace.rows,
        num_micro_batches=trace.num_micro_batches,
        instants=instants(trace, rounding=_UNROUNDED, levels=None if is_cpu else replayed.levels),
        planning_seconds=planning_seconds,
        notes=trace.notes,
    )
