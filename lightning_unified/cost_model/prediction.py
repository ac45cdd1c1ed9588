"""What a step is predicted to take, before it runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_unified.cost_model.trace.trace import Category, Confidence

__all__ = ["Prediction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The peak of one step, and where it comes from.

    Attributes:
        peak_bytes: The most that tensors take at once, workspaces of libraries included, as `max_memory_allocated` counts it.
        reserved_bytes: The most that the allocator takes of the device for them; on a CPU what the process grows by.
        categories: `peak_bytes` at its instant, by what it is for.
        confidence: `"high"`, `"medium"` (values were made up that decide no shape) or `"low"` (not to be trusted; probe).
        seconds: What the step is predicted to last; None where nothing is known of the device's speed.
        instant: Where in the step the peak is, in words: phase, module and operation.
        instants: The peak of each place, in the order of the step: in words, bytes.
        rows: Of the micro-batch it is predicted for.
        parts: Micro-batches in the step.
        planning_seconds: What the prediction took.
        notes: What was assumed, and what could not be seen.
        validation: What the validation step is predicted to take in the middle of such a fit; None where that was not asked.
        generation_bytes: What tensors take at the fullest of what is generated before the step, by formula, with gradients and
            optimizer state beside it; 0 where nothing is.
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
        """The most that the device must give at any instant of a step: while it generates, or from then on."""
        return max(self.reserved_bytes, self.generation_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `plan.json`."""
        return asdict(self)
