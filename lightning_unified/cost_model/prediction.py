"""The predicted memory and time of a step, made from its trace."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_unified.cost_model.memory.peak import describe_instant, instants, peak
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.cost_model.printed import Printed
from lightning_unified.cost_model.trace.trace import Category, Confidence, Trace
from lightning_unified.hardware.allocators.settings import AllocatorSettings

__all__ = ["ROUNDING", "Prediction", "summarise"]

# Multiple of bytes to which each backend rounds a tensor. The CPU's counter does not round; Metal's multiple is judgement.
ROUNDING = {"cuda": 512, "rocm": 512, "mps": 256, "cpu": 1}
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
        parts: Number of micro-batches in the step.
        planning_seconds: Seconds the prediction took.
        notes: Assumptions, and effects the dry run cannot see.
        validation: Prediction of a validation step in the middle of the same fit; None if not requested.
        generation_bytes: Peak of the generation that precedes the step, by formula, with gradients and optimizer state beside
            it; 0 without generation.
    """

    peak_bytes: int
    reserved_bytes: int
    categories: Mapping[Category, int]
    confidence: Confidence
    seconds: float | None
    instant: str
    rows: int
    parts: int = 1
    instants: tuple[tuple[str, int], ...] = ()
    planning_seconds: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)
    validation: "Prediction | None" = None
    generation_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """Peak of the whole step: the larger of generation and of the step itself."""
        return max(self.reserved_bytes, self.generation_bytes)

    def within(self, limit: int) -> "Prediction":
        """Return the prediction of a step that fits within `limit` bytes.

        At its limit an allocator frees its caches, so that it reserves no more than that.
        """
        return replace(self, reserved_bytes=min(self.reserved_bytes, max(limit, self.peak_bytes)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `plan.json`."""
        return asdict(self)


def summarise(
    trace: Trace,
    *,
    seconds: float | None = None,
    planning_seconds: float = 0.0,
    settings: AllocatorSettings = _DEFAULT,
) -> Prediction:
    """Return the prediction that follows from the trace of a step.

    On a GPU the peak counts the allocator's blocks, because device counters do. A block of CUDA's large pool keeps up to 1
    MiB more than its tensor needs. So does one of Metal's from torch 2.14 on; before, a freed block is reused whole
    (`m_current_allocated_memory` in torch's MPSAllocator.mm). On a CPU the peak counts the tensors.

    Args:
        trace: A step in steady state, at the size in question.
        seconds: Predicted seconds of the step; None if the device's speed is unknown.
        planning_seconds: Seconds the prediction took.
        settings: Settings of the allocator.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    replayed = allocator_peak(trace, settings=settings)
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
