"""Entry points of the dry run: a training step, a validation step, or many sizes of one."""

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
    """Return the operations, allocations and frees of a training step, run on fake tensors.

    Lightning's loops and this package's step run in full: `training_step`, backward, clipping, the optimizers, logging and callbacks that
    average weights. The traced step is the second one that writes weights, so optimizer state and the previous step's gradients exist.
    `module`, random generators and `trainer` stay unchanged.

    Args:
        module: Any module; its parameters may be on the meta device.
        batch: A batch as `training_step` gets it.
        rows: Rows of a micro-batch.
        parts: The number of micro-batches.
        later_rows: Rows of every micro-batch but the first, if the batch does not divide evenly; None for `rows`.
        length: Positions of a row; None for as many as in `batch`.
        backend: The backend whose kernels are meant: `"cpu"`, `"cuda"`, `"rocm"` or `"mps"`.
        precision: Lightning's name; None for the Trainer's, or `"32-true"` without a Trainer.
        recompute: The blocks that recompute their activations: True for all, False for none, a policy for some. None leaves the module
            as it is.
        optimizer_kernel: `"fused"`, `"foreach"` or `"for-loop"`; None for the optimizers' own choice on that backend.
        loss_chunk: Rows of logits that the chunked loss computes at a time, if the module offers one; None leaves the module as it is.
        trainer: The live Trainer, with the settings that the module reads, its callbacks, clipping and accumulation.
        accumulate: Batches in an accumulation window; None for the Trainer's.
        clip: The norm for gradient clipping; None for the Trainer's.

    Raises:
        DryRunError: If the step cannot run without values; the message says where and why.
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
    """Return the trace of a validation step in the middle of a fit.

    Optimizer state exists then, and gradients do not.

    Args:
        module: As for `trace_step`.
        batch: A batch as `validation_step` gets it.
        rows: Rows of the batch to trace.
        length: As for `trace_step`.
        backend: As for `trace_step`.
        precision: As for `trace_step`.
        trainer: As for `trace_step`.
        train_batch: A batch as `training_step` gets it, if it differs in structure from `batch`; the dry run trains on it first.
        is_prepared: Whether the rule `prepare` has already been applied to `train_batch`.
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
    """Traces one module's step at many sizes, faster than `trace_step` with equal results.

    All sizes share one combination of memory options.

    A dry run executes an untraced step first, which leaves optimizer state and gradients. Further sizes are traced on the same fake copy
    if they begin in the same state (`DryRun.go_on` says how that is checked). If they do not, each size gets a new dry run.

    Args:
        module: As for `trace_step`.
        batch: As for `trace_step`.
        is_prepared: Whether the rule `prepare` has already been applied to `batch`; if not, the dry run applies it.
        backend: As for `trace_step`.
        trainer: As for `trace_step`.
        precision: As for `trace_step`.
        recompute: As for `trace_step`.
        optimizer_kernel: As for `trace_step`.
        loss_chunk: As for `trace_step`.
        fake_copies: Keeps the last dry run, by precision, kernel and loss chunk. Combinations that differ only in recomputation share this
            mapping, and so one fake copy.
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
        """Return the trace of a step.

        Args:
            rows: Rows of the first micro-batch.
            parts: The number of micro-batches.
            later_rows: Rows of every micro-batch but the first; None for `rows`.

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
        """The dry run whose fake copy may trace a further step."""
        return self._fake_copies.get(self._key)
