"""The device gradient check: compare micro-batch gradients of a device with the CPU's."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_unified.errors import UndoError
from lightning_unified.step.exactness.gradients import tolerance_in_training
from lightning_unified.step.exactness.losses import Weighting
from lightning_unified.step.exactness.trials.host import bytes_of_copies, may_be_wrong, on_host, to_host
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.oom import release_cached_memory
from lightning_unified.step.recovery.undone_run import Undone, draws_or_mixes, gradient_of_step, owns_dropout
from lightning_unified.step.split import bounds, split_rows
from lightning_unified.terminal import activity
from lightning_unified.units import format_bytes

__all__ = ["DeviceGradientCheck"]

log = logging.getLogger("lightning_unified")

_SLICES = 8  # slices of a micro-batch that the CPU runs one by one: an eighth of the activations at a time
# Judgement: far above the rounding of formats (at most 5e-3 in the tests' modules, with bfloat16 on a CPU), and far below the errors
# of pytorch issue 177116, where gradients are wrong by a factor of 1,000 and more.
_LIMIT, _LIMIT_HALF = 1e-2, 0.2
_RANDOM = "its step draws random numbers, which differ from device to device"
_NOT_EXACT = "its batches are not known to split exactly, so the CPU cannot run them in slices"


class DeviceGradientCheck:
    """Compares the gradient of one micro-batch with the CPU's, once for each micro-batch size.

    The device runs the micro-batch as training does, at its full size and precision, because the known faults show in
    large backward passes only. The CPU runs it in float32, in up to eight slices, on copies of the weights. All changes
    are undone. The check costs a step on the device and one on the CPU, and meanwhile 8 bytes of memory a parameter. If
    that memory is missing, or the module does not run on a CPU, nothing is compared and the run says so once. The run
    continues with any result.

    `step` runs `training_step` as the loop does.
    """

    def __init__(
        self, trainer: L.Trainer, policy: MemoryPolicy, *, step: Callable[["OrderedDict[str, Any]"], ClosureResult]
    ) -> None:
        self._trainer, self._policy, self._splitter = trainer, policy, policy.batches.splitter("fit")
        self._step = step
        self._module = trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._seen: set[int] = set()
        self._changes = False
        self._silent = not policy.batches.checks("fit") or not may_be_wrong(self._device)
        self._excused = False
        self._in_eval = draws_or_mixes

    def compare(self, kwargs: "OrderedDict[str, Any]", *, is_split: bool) -> None:
        """Compare the gradients of the batch's first micro-batch; warn if they differ.

        Each size of micro-batch is compared once. `kwargs` are the arguments of `training_step`, the whole batch first.
        """
        shape = None if self._silent else self._splitter.shape(next(iter(kwargs.values())))
        if shape is None:
            return
        rows = max(self._policy.sizes.micro_batches(shape)) if is_split else shape.rows
        self._changes = self._changes or is_split
        if self._changes and rows not in self._seen:
            self._seen.add(rows)
            with activity("comparing gradients with the CPU's"):
                found = self._compared(kwargs, rows, of=shape.rows)
            self._report(rows, found)

    def _report(self, rows: int, found: float | str) -> None:
        if isinstance(found, str):
            finding = f"gradients of {rows} rows are not compared with the CPU's: {found}"
            if not self._excused:
                self._policy.events.append(finding)
                log.info("The %s", finding)
            self._excused = True
        elif not found <= self._limit:
            self._policy.events.append(
                f"gradients of {rows} rows on {self._device} differ from the CPU's by {found:.1e}"
            )
            log.warning(
                "The gradient of a micro-batch of %d rows on %s differs from the CPU's by %.1e, relative to its size; at most %.0e is "
                "rounding. Backward passes of more than 32,768 rows x positions are known to go wrong on MPS after a change of size "
                "(pytorch issue 177116). Set memory.micro_batch_size so small that the product stays below that, and keep it; or "
                "train with hardware=cpu to see whether results differ.",
                rows,
                self._device,
                found,
                self._limit,
            )

    @property
    def _limit(self) -> float:
        return _LIMIT if tolerance_in_training(self._trainer) < 2e-3 else _LIMIT_HALF

    def _compared(self, kwargs: "OrderedDict[str, Any]", rows: int, *, of: int) -> float | str:
        """Return the distance of the two gradients relative to the CPU's, or why it is unknown."""
        if not self._policy.splits.is_exact:
            return _NOT_EXACT
        needed, available = bytes_of_copies(self._module), self._policy.watch.reading().available.bytes
        if available is not None and needed > available:
            return f"copies of the weights need {format_bytes(needed)}, and {format_bytes(available)} are available"
        try:
            found = self._undone(kwargs, rows, of=of)
            if found == _RANDOM:
                self._in_eval = owns_dropout
                found = self._undone(kwargs, rows, of=of)
            return found
        except UndoError:
            raise
        except Exception as error:  # a module may do anything that fails on a CPU or with copied weights
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        release_cached_memory(self._device)  # after the `except` block, whose traceback held the frames
        return f"the step fails there ({why})"

    def _undone(self, kwargs: "OrderedDict[str, Any]", rows: int, *, of: int) -> float | str:
        with Undone(self._trainer, in_eval=self._in_eval):
            return self._distance(kwargs, rows, of=of)

    def _distance(self, kwargs: "OrderedDict[str, Any]", rows: int, *, of: int) -> float | str:
        key, batch = next(iter(kwargs.items()))
        own = self._splitter.split(batch, 0, rows, rows=of) if rows < of else batch
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        ours = self._gradient(kwargs, key, apply_to_collection(own, Tensor, _own), parameters)
        unit = self._policy.sizes.unit
        # one weight cannot join the slices of a loss whose summands have their own
        most = rows if self._policy.splits.loss_rule.summands else max(-(-rows // _SLICES), unit)
        sizes = split_rows(rows, micro_batch_size=most, unit=unit)
        slices = [self._splitter.split(batch, *span, rows=of) for span in bounds(sizes)]
        weighting = Weighting(self._policy.splits.loss_rule, slices, sizes)
        shares = [weighting.share(index) for index in range(len(slices))]
        with on_host(self._trainer) as copies:
            host = [to_host(one) for one in slices]
            again, gradients = self._gradient(kwargs, key, host[0], copies), torch.zeros_like(ours)
            for index, (one, share) in enumerate(zip(host, shares, strict=True)):
                gradient = self._gradient(kwargs, key, one, copies) if share != 0 else torch.zeros_like(ours)
                if index == 0 and share != 0 and not torch.equal(gradient, again):
                    return _RANDOM
                gradients += gradient if share is None else gradient * share
        if any(parameter.grad is not None for parameter in parameters):
            return "it holds on to its weights, so that they could not be exchanged for copies"
        if not gradients.any() or not gradients.isfinite().all():
            return "the gradient on the CPU is zero or not finite"
        distance = float((ours - gradients).norm() / gradients.norm())
        return distance if distance == distance else float("inf")  # noqa: PLR0124  # NaN counts as infinitely far

    def _gradient(self, kwargs: "OrderedDict[str, Any]", key: str, batch: Any, parameters: Sequence[Tensor]) -> Tensor:
        return gradient_of_step(
            self._trainer, lambda: self._step(OrderedDict(kwargs, **{key: batch})), parameters=parameters
        )


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
