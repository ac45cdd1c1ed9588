"""The plan of a run: what was decided before the first step, and why."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run does about memory; the one place where a planner's decisions arrive.

    Attributes:
        micro_batch_size: Rows that go through forward and backward at once; None runs each batch whole.
        recompute: Whether activations are recomputed in the backward pass; None leaves the module as it is.
        precision: Lightning's name of the precision, such as `"bf16-mixed"`.
        budget_bytes: What this run may use.
        predicted_peak_bytes: By category; empty when nothing was predicted.
        reasons: Why, for each choice, in words.
    """

    micro_batch_size: int | None
    recompute: bool | None
    precision: str
    budget_bytes: int
    predicted_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `plan.json`."""
        return asdict(self)
