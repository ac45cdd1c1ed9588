"""The predicted memory and time of a step, before it runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_unified.cost_model.trace.trace import Category, Confidence

__all__ = ["Prediction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted peak of one step, with the categories and the instant it consists of.

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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `plan.json`."""
        return asdict(self)
