"""The plan of a run: the memory decisions taken before the first step, each with its reason."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.printed import Printed
from lightning_unified.cost_model.search import Candidate

__all__ = ["Layout", "Plan"]

_KEYS = {"num_micro_batches": "parts"}  # attributes that `plan.json` calls otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A step on several devices under one strategy, with or without activation checkpointing.

    Attributes:
        strategy: `"unified_ddp"` or `"unified_fsdp"`.
        hold: What a rank of `unified_fsdp` holds whole during a step: `"parameters"` or `"shards"`; empty for `unified_ddp`.
        recompute: Modules under activation checkpointing, in words.
        micro_batch_size: Rows of the largest micro-batch of a device.
        num_micro_batches: Number of micro-batches in a step.
        peak_bytes: Peak of tensors on a device.
        reserved_bytes: Peak of bytes that a device's allocator reserves.
        seconds: Predicted seconds of a step, communication included.
        link_seconds: Seconds of it that the link is busy, overlapped or not.
        fits: Whether `reserved_bytes` is within the budget of a device.
    """

    strategy: str
    hold: str
    recompute: str
    micro_batch_size: int
    num_micro_batches: int
    peak_bytes: int
    reserved_bytes: int
    seconds: float
    link_seconds: float | None
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Printed):
    """Memory decisions of one run. Every planner writes them into this record; `print` shows them as tables.

    Attributes:
        micro_batch_size: Rows that run forward and backward at once; None runs each batch whole.
        recompute: Whether activation checkpointing is on; None leaves the module as it is.
        precision: Lightning's name of the precision, such as `"bf16-mixed"`.
        budget_bytes: Bytes this run may use.
        recomputed: Modules under activation checkpointing, in words: `"6 of 12 blocks"`; empty if unknown.
        optimizer_kernel: `"fused"`, `"foreach"` or `"for-loop"`; None leaves the optimizer as it was built.
        loss_chunk: Rows of logits computed at once; None leaves the module's own loss.
        attention: `"chunked"` computes attention in chunks of queries; None leaves it to torch.
        prediction: Predicted memory and time of a step; None if nothing was predicted.
        predicted_peak_bytes: Predicted reading of the device's peak counter, including bytes the process held before; None
            without a prediction.
        devices: Number of devices; every figure is that of one of them.
        strategy: `"unified_ddp"`, `"unified_fsdp"` or `"fsdp"` for several devices; empty for one.
        hold: What a rank of `unified_fsdp` holds whole during a step: `"parameters"` or `"shards"`; else empty.
        layouts: Strategies of several devices with and without activation checkpointing, compared.
        alternatives: Other plans the search compared, fitting ones first.
        reasons: Reason of each decision, by attribute name.
    """

    micro_batch_size: int | None
    recompute: bool | None
    precision: str
    budget_bytes: int
    recomputed: str = ""
    optimizer_kernel: str | None = None
    loss_chunk: int | None = None
    attention: str | None = None
    prediction: Prediction | None = None
    predicted_peak_bytes: int | None = None
    devices: int = 1
    strategy: str = ""
    hold: str = ""
    layouts: tuple[Layout, ...] = ()
    alternatives: tuple[Candidate, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `plan.json`."""
        return asdict(self, dict_factory=_with_keys_of_json)


def _with_keys_of_json(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {_KEYS.get(name, name): value for name, value in fields}
