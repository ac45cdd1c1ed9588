"""Memory of the other phases of a fit: validation, and generation before a step.

A validation step runs with the optimizer state allocated and without gradients, and its batch may be larger than a training batch. It
is traced by a dry run, like a training step. Generation is not traced: `cost_model.generation` computes it by formula.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_unified.cost_model.candidates import describe_split, even_splits
from lightning_unified.cost_model.generation import generation_before
from lightning_unified.cost_model.memory.limit import fits_within
from lightning_unified.cost_model.memory.static import static_bytes
from lightning_unified.cost_model.prediction import Prediction, summarise
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.errors import UndoError
from lightning_unified.planner.dry_run import DryRun, StepSpec
from lightning_unified.planner.ranks.sharded_copy import Sharding
from lightning_unified.planner.repeats import Twins
from lightning_unified.planner.search.step_traces import BatchRows, CountedMemory
from lightning_unified.planner.search.traced_sizes import TracedSizes
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.split import BatchShape, tensors_in
from lightning_unified.step.undo import StateWatch
from lightning_unified.terminal import activity
from lightning_unified.units import format_bytes

__all__ = ["FirstValidation", "ValidationPlan", "outline", "plan_validation", "with_generation"]

log = logging.getLogger("lightning_unified")

_KNOWN = 1 << 18  # entries: longer integer tensors lose their values, which a dry run would not read either


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPlan:
    """The predicted memory of a validation step, and the micro-batch size that fits.

    Attributes:
        prediction: The prediction for the step at the chosen micro-batch size.
        refused: The smallest micro-batch size that does not fit; None if the whole batch fits.
        fits: Whether the step fits at any size.
        reason: The decision in words.
    """

    prediction: Prediction
    refused: int | None
    fits: bool
    reason: str


def plan_validation(
    step: StepSpec,
    *,
    limit: int | None,
    micro_batch_size: int | None = None,
    factor: float = 1.0,
    counted: CountedMemory | None = None,
    twins: Twins | None = None,
    state: StateWatch | None = None,
) -> ValidationPlan:
    """Return the plan with the fewest micro-batches that fit within `limit` bytes.

    Nothing runs on the device.

    Args:
        step: The validation step, of the module as the fit runs it, with its memory options applied.
        limit: Bytes that the machine gives; None never splits the batch for lack of memory.
        micro_batch_size: The largest micro-batch size allowed; None allows the whole batch.
        factor: Correction for earlier predictions of this kind on this machine, 1 or more.
        counted: The memory to count beside the tensors; `updates` and `reduction_bytes` are those of training and play no part.
        twins: The module's repeated blocks, if its training step was traced; the training step before a validation step then skips them.
        state: The watch of the state outside the fake copies, if its training step was traced.

    Raises:
        DryRunError: If the step cannot be traced.
    """
    begun, counted, batch = time.monotonic(), counted or CountedMemory(), BatchRows.of(step)
    sizes = TracedSizes(
        lambda rows, *_: DryRun(step, twins=twins, state=state).run(rows),
        rows=batch.rows,
        unit=batch.unit,
        row_bytes=batch.row_bytes,
        workspaces=counted.workspaces,
    )
    splits = even_splits(batch.rows, unit=batch.unit, micro_batch_size=micro_batch_size)

    def goes_through(trace: Trace) -> bool:
        return limit is None or fits_within(trace, int(limit / factor), settings=counted.allocator)

    at = _fewest_that_fit(len(splits), lambda index: goes_through(sizes.at(splits[index][0])))
    while not (fits := goes_through(sizes.exactly(splits[at][0], num_micro_batches=1))) and at + 1 < len(splits):
        at += 1
    seconds = time.monotonic() - begun
    found = summarise(sizes.at(splits[at][0]), planning_seconds=seconds, settings=counted.allocator)
    prediction = replace(found, num_micro_batches=len(splits[at]))
    if limit is not None and fits:
        prediction = prediction.within(limit)
    return ValidationPlan(
        prediction=prediction,
        refused=None if at == 0 else splits[at - 1][0],
        fits=fits,
        reason=_reason(prediction, fits=fits, limit=limit),
    )


def outline(batch: Any) -> Any | None:
    """Return a light copy of a batch for later dry runs.

    It keeps shapes, and the values of small integer tensors.

    Args:
        batch: Any batch. For a custom type whose tensors cannot be reached, the result is None.
    """
    light = apply_to_collection(batch, Tensor, _outlined, allow_frozen=True)
    tensors = list(tensors_in(light))
    return light if tensors and all(one.is_meta or not _is_large(one) for one in tensors) else None


def _outlined(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta") if _is_large(tensor) else tensor.detach().to("cpu", copy=True)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() > (1 if tensor.is_floating_point() or tensor.is_complex() else _KNOWN)


def _fewest_that_fit(count: int, fits: Callable[[int], bool]) -> int:
    """Return the index of the first split that fits, or the last index, by binary search.

    Later splits never take more.
    """
    if count == 1 or fits(0):
        return 0
    low, high = 1, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _reason(prediction: Prediction, *, fits: bool, limit: int | None) -> str:
    size, split = format_bytes(prediction.reserved_bytes), describe_split(prediction.rows, prediction.num_micro_batches)
    if limit is None:
        return f"{split}: {size}"
    if fits:
        return f"{split}: {size} of {format_bytes(limit)}"
    return f"does not fit: {split} needs {size}, and {format_bytes(limit)} are left"


class FirstValidation:
    """Plans a fit's validation steps.

    It traces each validation batch that is larger than those before it.

    The first one comes from the sanity check. The dry run includes the optimizer state, as in the middle of a fit. So the run knows
    before training begins whether the validation after the first epoch fits. In two cases the plan waits for the first training batch:
    a training step cannot be traced on a validation batch, or the training plan changes memory options that validation uses too.

    Attributes:
        prediction: The prediction for the largest validation step so far; None while there is none.
        reason: The decision in words; empty before the first validation batch.
    """

    def __init__(
        self, trainer: L.Trainer, policy: MemoryPolicy, *, precision: str, sharding: Sharding | None = None
    ) -> None:
        self._trainer, self._policy, self._precision, self._sharding = trainer, policy, precision, sharding
        self._train_batch: Any = None
        self._largest: tuple[Any, BatchShape | None] | None = None  # light copies, until training has a plan
        self._seen: list[BatchShape] = []
        self._has_split = False
        self.prediction: Prediction | None = None
        self.reason = ""

    def look(self, batch: Any, shape: BatchShape | None, *, limit: int, factor: float) -> None:
        """Plan for `batch`, unless a batch as large already has a plan.

        Args:
            batch: The whole batch.
            shape: The shape of the batch; None for a batch without a row dimension.
            limit: Bytes that the step may take.
            factor: Correction for earlier predictions of this kind on this machine, 1 or more.
        """
        size = shape or BatchShape(rows=1, elements=1)
        if any(size.rows <= known.rows and size.elements <= known.elements for known in self._seen):
            return
        self._seen.append(size)
        light = outline(batch)
        self._largest = self._largest if light is None else (light, shape)
        known = batch if light is None else light  # a dry run keeps its batch alive until garbage is collected
        with activity("planning the validation step"):
            self._plan(known, shape, limit=limit, factor=factor)

    def training_planned(self, train_batch: Any, *, limit: int, factor: float) -> None:
        """Keep the training batch, and plan validation again if its memory changed."""
        if self._trainer.enable_validation:
            self._train_batch = outline(train_batch)
        largest, self._largest = self._largest, None
        if largest is None or (self.prediction is not None and self._policy.applied_options.loss_chunk is None):
            return
        if self._has_split:
            self._policy.evaluation_sizes.evidence.start_over()
        self._plan(*largest, limit=limit, factor=factor)

    def _plan(self, batch: Any, shape: BatchShape | None, *, limit: int, factor: float) -> None:
        sizes, watch = self._policy.evaluation_sizes, self._policy.watch
        if not sizes.runs_whole and not self._has_split:
            self.reason = "not predicted: its micro-batch size is known"
            return
        try:
            step = StepSpec(
                module=self._trainer.lightning_module,
                batch=batch,
                backend=watch.reading().backend,
                precision=self._precision,
                trainer=self._trainer,
                accumulate=1,
                validates=True,
                train_batch=self._train_batch,
                is_prepared=self._train_batch is not None,
                sharding=self._sharding,
            )
            counted = CountedMemory(workspaces=watch.machine is None, allocator=watch.allocator)
            found = plan_validation(
                step, limit=limit, micro_batch_size=sizes.max_micro_batch_size, factor=factor, counted=counted
            )
        except UndoError:
            raise
        except Exception as error:  # in the module or the planner: a run must not end because it has no plan
            self.reason = f"not predicted: {error}"
            return
        self.prediction, self.reason = found.prediction, found.reason
        if found.refused is not None and shape is not None and self._policy.batches.of("validate").splittable:
            sizes.plan(shape, micro_batch_size=found.prediction.rows, refused=found.refused, room_bytes=watch.bytes)
            self._has_split = True
            self._policy.events.append(f"validation planned: {found.reason}")
        if not found.fits:
            log.warning("The validation step is predicted not to fit. It %s.", found.reason)


def with_generation(
    prediction: Prediction, module: L.LightningModule, batch: Any, *, precision: str
) -> tuple[Prediction, str]:
    """Add the memory of generation before the step to `prediction`.

    The second result describes it in words, and is empty without generation.

    During generation there are no activations. Gradients of the previous step are still allocated, because Lightning drops them after
    the forward pass. The optimizer state is allocated too.
    """
    try:
        found = generation_before(module, batch, precision=precision)
    except ValueError as error:
        return prediction, f"not predicted: {error}"
    if found is None:
        return prediction, ""
    beside = static_bytes(module)["gradients"] + prediction.categories.get("optimizer state", 0)
    reason = (
        f"{found.rows} rows of {found.prompt} + {found.new} tokens before the step: {format_bytes(found.bytes.peak_bytes)}, of which "
        f"{format_bytes(found.bytes.cache)} keys and values; with gradients and optimizer state {format_bytes(found.bytes.peak_bytes + beside)}"
    )
    return replace(prediction, generation_bytes=found.bytes.peak_bytes + beside), reason
