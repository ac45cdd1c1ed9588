"""The plan of a run: what was decided before the first step, and why."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.search import Candidate

__all__ = ["Plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run does about memory; the one place where a planner's decisions arrive.

    Attributes:
        micro_batch_size: Rows that go through forward and backward at once; None runs each batch whole.
        recompute: Whether activations are recomputed in the backward pass; None leaves the module as it is.
        precision: Lightning's name of the precision, such as `"bf16-mixed"`.
        budget_bytes: What this run may use.
        recomputed: What is, in words: `"6 of 12 blocks"`; empty where that is not told.
        optimizer_kernel: `"fused"`, `"foreach"` or `"for-loop"`; None where the optimizer is as it was built.
        loss_chunk: Rows of logits at once; None where the module computes its loss as it does.
        prediction: What a step is predicted to take; None when nothing was predicted.
        predicted_peak_bytes: What the device's counter will show then, with what the process held before; None as for `prediction`.
        alternatives: What else was looked at, what fits first.
        reasons: Why, for each choice, in words.
    """

    micro_batch_size: int | None
    recompute: bool | None
    precision: str
    budget_bytes: int
    recomputed: str = ""
    optimizer_kernel: str | None = None
    loss_chunk: int | None = None
    prediction: Prediction | None = None
    predicted_peak_bytes: int | None = None
    alternatives: tuple[Candidate, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `plan.json`."""
        return asdict(self)
