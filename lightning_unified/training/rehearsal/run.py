"""Rehearse a step: a shadow of the module, fitted by a real Trainer without a value, followed operation by operation."""

from typing import Any

import lightning as L

from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planning.trace import Trace
from lightning_unified.training.rehearsal.rehearsal import Rehearsal, Step
from lightning_unified.training.rehearsal.strategy import precision_of

__all__ = ["Rehearsals", "rehearse", "rehearse_validation"]


def rehearse(
    module: L.LightningModule,
    batch: Any,
    *,
    rows: int,
    parts: int = 1,
    length: int | None = None,
    backend: str = "cpu",
    precision: str | None = None,
    recompute: RecomputePolicy | bool | None = None,
    optimizer_kernel: str | None = None,
    loss_chunk: int | None = None,
    trainer: L.Trainer | None = None,
    accumulate: int | None = None,
    clip: float | None = None,
) -> Trace:
    """Return what a training step of `module` does to memory, without running it on values.

    The step is a real one of Lightning's loops and of our own: `training_step`, backward, clipping, the optimizers, what is logged and
    what callbacks keep. It is the second in which weights are written, so that optimizer state and the gradients of the step before
    are there. Neither `module`, nor random generators, nor `trainer` are changed.

    Args:
        module: Any; its parameters may be on the meta device.
        batch: As its `training_step` gets it.
        rows: Of a micro-batch.
        parts: Micro-batches of the batch.
        length: Entries of a row; None for as many as in `batch`.
        backend: `"cpu"`, `"cuda"`, `"rocm"` or `"mps"`: whose kernels are meant.
        precision: Lightning's name of one; None for the Trainer's, `"32-true"` without one.
        recompute: None leaves the module as it is, True has all its blocks recompute, a policy as it says.
        optimizer_kernel: `"fused"`, `"foreach"` or `"for-loop"`; None for what the optimizers would choose there.
        loss_chunk: Rows of logits at once, where the module offers that; None leaves it.
        trainer: The live Trainer, for what the module asks of it, its callbacks, clipping and accumulation.
        accumulate: Batches in an accumulation window; None for the Trainer's.
        clip: Gradients' norm; None for the Trainer's.

    Raises:
        RehearsalError: If the step cannot be run without values; the message says where and why.
    """
    rehearsal = Rehearsal(
        module,
        batch,
        length=length,
        backend=backend,
        precision=precision or precision_of(trainer),
        kernel=optimizer_kernel,
        live=trainer,
        accumulate=accumulate,
        clip=clip,
    )
    return rehearsal.run(Step(rows=rows, parts=parts, recompute=recompute, loss_chunk=loss_chunk))


def rehearse_validation(
    module: L.LightningModule,
    batch: Any,
    *,
    rows: int,
    length: int | None = None,
    backend: str = "cpu",
    precision: str | None = None,
    trainer: L.Trainer | None = None,
    train_batch: Any = None,
) -> Trace:
    """Return what a validation step in the middle of a fit does to memory: optimizer state is there too, gradients are not.

    Args:
        module: As for `rehearse`.
        batch: As its `validation_step` gets it.
        rows: Of the batch.
        length: As for `rehearse`.
        backend: As for `rehearse`.
        precision: As for `rehearse`.
        trainer: As for `rehearse`.
        train_batch: As its `training_step` gets it, where that is another kind of batch; it has run before.

    Raises:
        RehearsalError: As for `rehearse`.
    """
    rehearsal = Rehearsal(
        module,
        batch,
        length=length,
        backend=backend,
        precision=precision or precision_of(trainer),
        kernel=None,
        live=trainer,
        accumulate=1,
        clip=None,
        validates=True,
        train_batch=train_batch,
    )
    return rehearsal.run(Step(rows=rows))


class Rehearsals:
    """Steps of one module at many sizes and settings, each as `rehearse` would tell it, for less than half of the time.

    A rehearsal runs a step before the one that it follows, for what that one finds: optimizer state and gradients. Where further
    steps find the same, they are followed on the same shadow, one after the other; what shows that they do is said at
    `Rehearsal.go_on`. Elsewhere every step is rehearsed by itself.

    Args:
        module: As for `rehearse`.
        batch: As for `rehearse`.
        backend: As for `rehearse`.
        trainer: As for `rehearse`.
    """

    def __init__(self, module: L.LightningModule, batch: Any, *, backend: str, trainer: L.Trainer | None) -> None:
        self._module, self._batch, self._backend, self._trainer = module, batch, backend, trainer
        self._open: dict[tuple[str, str | None], Rehearsal] = {}

    def step(self, step: Step, *, precision: str, optimizer_kernel: str | None) -> Trace:
        """Return what a step does to memory.

        Args:
            step: Its size, and what is set on the module.
            precision: As for `rehearse`.
            optimizer_kernel: As for `rehearse`.

        Raises:
            RehearsalError: As for `rehearse`.
        """
        key = precision, optimizer_kernel
        trace = self._open[key].go_on(step) if key in self._open else None
        if trace is not None:
            return trace
        self._open[key] = Rehearsal(
            self._module,
            self._batch,
            backend=self._backend,
            precision=precision,
            kernel=optimizer_kernel,
            live=self._trainer,
        )
        return self._open[key].run(step)
