"""Trace a step: a fake copy of the module, fitted by a real Trainer without a value, followed operation by operation."""

from typing import Any

import lightning as L

from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.dry_run.dry_run import DryRun
from lightning_unified.planner.dry_run.fake_fit import StepSpec
from lightning_unified.planner.dry_run.strategy import precision_of

__all__ = ["DryRuns", "trace_step", "trace_validation"]


def trace_step(
    module: L.LightningModule,
    batch: Any,
    *,
    rows: int,
    parts: int = 1,
    later_rows: int | None = None,
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
        later_rows: Of every micro-batch but the first, where the batch does not divide evenly; None for as many as of the first.
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
        DryRunError: If the step cannot be run without values; the message says where and why.
    """
    spec = StepSpec(
        module=module,
        batch=batch,
        length=length,
        backend=backend,
        precision=precision or precision_of(trainer),
        kernel=optimizer_kernel,
        loss_chunk=loss_chunk,
        live=trainer,
        accumulate=accumulate,
        clip=clip,
    )
    return DryRun(spec, recompute=recompute).run(rows, parts, later_rows)


def trace_validation(
    module: L.LightningModule,
    batch: Any,
    *,
    rows: int,
    length: int | None = None,
    backend: str = "cpu",
    precision: str | None = None,
    trainer: L.Trainer | None = None,
    train_batch: Any = None,
    is_prepared: bool = False,
    loss_chunk: int | None = None,
) -> Trace:
    """Return what a validation step in the middle of a fit does to memory: optimizer state is there too, gradients are not.

    Args:
        module: As for `trace_step`.
        batch: As its `validation_step` gets it.
        rows: Of the batch.
        length: As for `trace_step`.
        backend: As for `trace_step`.
        precision: As for `trace_step`.
        trainer: As for `trace_step`.
        train_batch: As its `training_step` gets it, where that is another kind of batch; it has run before.
        is_prepared: Whether `train_batch` is what the rule `prepare` returned.
        loss_chunk: As for `trace_step`.

    Raises:
        DryRunError: As for `trace_step`.
    """
    spec = StepSpec(
        module=module,
        batch=batch,
        length=length,
        backend=backend,
        precision=precision or precision_of(trainer),
        loss_chunk=loss_chunk,
        live=trainer,
        accumulate=1,
        validates=True,
        train_batch=train_batch,
        is_prepared=is_prepared,
    )
    return DryRun(spec).run(rows)


class DryRuns:
    """Steps of one module under one setting at many sizes, each as `trace_step` would tell it, and in less time.

    A dry run runs a step before the one that it follows, for what that one finds: optimizer state and gradients. Where further
    steps find the same, they are followed on the same fake copy, one after the other; by what that shows is said at `DryRun.go_on`.
    Elsewhere every step is traced by itself.

    Args:
        module: As for `trace_step`, like all others.
        batch: A batch.
        is_prepared: Whether it is what the rule `prepare` returned; else a dry run prepares it.
        backend: Whose kernels are meant.
        trainer: The live Trainer.
        precision: Lightning's name of one.
        recompute: What is recomputed.
        optimizer_kernel: The optimizers' kernel.
        loss_chunk: Rows of logits at once.
        fake copies: Where the last dry run is kept, by all of the setting but what is recomputed: settings that share it, and differ in
            nothing else, follow their steps on one fake copy.
    """

    def __init__(
        self,
        module: L.LightningModule,
        batch: Any,
        *,
        is_prepared: bool = False,
        backend: str,
        trainer: L.Trainer | None,
        precision: str,
        recompute: RecomputePolicy | bool | None = None,
        optimizer_kernel: str | None = None,
        loss_chunk: int | None = None,
        fake_copies: dict[Any, DryRun] | None = None,
    ) -> None:
        self._recompute, self._key = recompute, (precision, optimizer_kernel, loss_chunk)
        self._fake_copies: dict[Any, DryRun] = {} if fake_copies is None else fake_copies
        self._spec = StepSpec(
            module=module,
            batch=batch,
            is_prepared=is_prepared,
            backend=backend,
            precision=precision,
            kernel=optimizer_kernel,
            loss_chunk=loss_chunk,
            live=trainer,
        )

    def step(self, rows: int, parts: int = 1, later_rows: int | None = None) -> Trace:
        """Return what a step does to memory.

        Args:
            rows: Of a micro-batch.
            parts: Micro-batches of the batch.
            later_rows: Of every micro-batch but the first; None for as many.

        Raises:
            DryRunError: As `trace_step`.
        """
        last = self._last
        trace = None if last is None else last.go_on(rows, parts, later_rows, recompute=self._recompute)
        if trace is None:
            last = self._fake_copies[self._key] = DryRun(self._spec, recompute=self._recompute)
            trace = last.run(rows, parts, later_rows)
        return trace

    @property
    def _last(self) -> DryRun | None:
        """The dry run on whose fake copy a further step may be followed."""
        return self._fake_copies.get(self._key)
