"""What the validation step in the middle of a fit takes: optimizer state is there, gradients are not, and its batch may be the larger one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning as L
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_unified.cost_model.even_splits import cuts
from lightning_unified.cost_model.memory.limit import fits_within
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.summary import summarise
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.planner.dry_run import trace_validation
from lightning_unified.planner.traced_sizes import TracedSizes
from lightning_unified.step.split import splitter_of, tensors_in
from lightning_unified.step.split.rules import given_to, rules_of
from lightning_unified.units import format_bytes

__all__ = ["ValidationPlanSource", "foresee_validation", "outline"]

_KNOWN = 1 << 18  # entries up to which whole numbers are kept: a dry run looks at no longer ones either


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPlanSource:
    """What a validation step will take, and how its batch has to be cut for it.

    Attributes:
        prediction: Of the step as it is to run.
        refused: Rows at once that do not fit; None if the whole batch does.
        fits: Whether it fits at all.
        reason: The same in words.
    """

    prediction: Prediction
    refused: int | None
    fits: bool
    reason: str


def foresee_validation(
    module: L.LightningModule,
    batch: Any,
    *,
    backend: str,
    precision: str,
    limit: int | None,
    trainer: L.Trainer | None = None,
    train_batch: Any = None,
    is_prepared: bool = False,
    loss_chunk: int | None = None,
    most: int | None = None,
    factor: float = 1.0,
    workspaces: bool = True,
    mmap_threshold: int | None = None,
) -> ValidationPlanSource:
    """Return the validation step in the fewest parts that go through within `limit` bytes; nothing is run.

    Args:
        module: As the fit has it, memory options that are set included.
        batch: A whole batch as `validation_step` gets it.
        backend: `"cpu"`, `"cuda"`, `"rocm"` or `"mps"`.
        precision: Lightning's name.
        limit: Of what the machine gives; None cuts nothing for want of memory.
        trainer: The Trainer that it is about; None for a plain one.
        train_batch: As `training_step` gets it; None where it is of the same kind as `batch`.
        is_prepared: Whether `train_batch` is what the rule `prepare` returned.
        loss_chunk: Rows of logits at once; None for the module as it is.
        most: The largest number of rows at once that is allowed.
        factor: By what predictions of this kind were too low on this machine.
        workspaces: Whether what the backend's libraries take for themselves is counted.
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if it was set; None is the C library's own, which moves.

    Raises:
        DryRunError: If the step cannot be traced.
    """
    begun, rules = time.monotonic(), rules_of(module, "validate", given=given_to(trainer))
    splitter = splitter_of(module, "validate", trainer=trainer)
    shape = splitter.shape(batch)
    rows = 1 if shape is None else shape.rows
    whole = shape is None or not rules.splittable or splitter.refusal(batch, rows) is not None
    unit = rows if whole else rules.unit
    traced = partial(
        trace_validation,
        module,
        batch,
        backend=backend,
        precision=precision,
        trainer=trainer,
        train_batch=train_batch,
        is_prepared=is_prepared,
        loss_chunk=loss_chunk,
    )
    sizes = TracedSizes(
        lambda rows, *_: traced(rows=rows),
        rows=rows,
        unit=unit,
        row_bytes=sum(one.numel() * one.element_size() for one in tensors_in(batch)) // rows,
        workspaces=workspaces,
    )
    ways = cuts(rows, unit=unit, most=most)

    def goes_through(trace: Trace) -> bool:
        return limit is None or fits_within(trace, int(limit / factor), mmap_threshold=mmap_threshold)

    at = _fewest_parts(len(ways), lambda index: goes_through(sizes.at(ways[index][0])))
    while not (fits := goes_through(sizes.exactly(ways[at][0], parts=1))) and at + 1 < len(ways):
        at += 1
    seconds = time.monotonic() - begun
    found = summarise(sizes.at(ways[at][0]), planning_seconds=seconds, mmap_threshold=mmap_threshold)
    prediction = replace(found, parts=len(ways[at]))
    return ValidationPlanSource(
        prediction=prediction,
        refused=None if at == 0 else ways[at - 1][0],
        fits=fits,
        reason=_reason(prediction, fits=fits, limit=limit),
    )


def outline(batch: Any) -> Any | None:
    """Return what a dry run has to know of a batch, which can be kept: shapes, and whole numbers where there are few.

    Args:
        batch: Any; None is returned for one of a kind of its own, whose tensors are not seen.
    """
    light = apply_to_collection(batch, Tensor, _outlined, allow_frozen=True)
    tensors = list(tensors_in(light))
    return light if tensors and all(one.is_meta or not _is_large(one) for one in tensors) else None


def _outlined(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta") if _is_large(tensor) else tensor.detach().to("cpu", copy=True)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() > (1 if tensor.is_floating_point() or tensor.is_complex() else _KNOWN)


def _fewest_parts(count: int, fits: Callable[[int], bool]) -> int:
    """Return the first of `count` ways that fits, the last if none before it does; a later one never takes more."""
    if count == 1 or fits(0):
        return 0
    low, high = 1, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _reason(prediction: Prediction, *, fits: bool, limit: int | None) -> str:
    taken, rows = prediction.reserved_bytes, prediction.rows
    size = format_bytes(taken if limit is None or not fits else min(taken, limit))
    counted = f"{rows} row{'s' * (rows != 1)}"
    cut = f"the whole batch of {counted} at once"
    if prediction.parts > 1:
        cut = f"{prediction.parts} parts of {'up to ' * (rows != 1)}{counted}"
    if limit is None:
        return f"{cut}: {size}"
    if fits:
        return f"{cut}: {size} of {format_bytes(limit)}"
    return f"does not fit: {cut} needs {size}, and {format_bytes(limit)} are left"
