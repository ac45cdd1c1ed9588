"""Rehearse a step: a shadow of the module, fitted by a real Trainer without a value, followed operation by operation."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_unified.errors import LightningUnifiedError, RehearsalError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planning.backends import mimic
from lightning_unified.planning.fake import fake_world
from lightning_unified.planning.places import Places
from lightning_unified.planning.recorder import Recorder
from lightning_unified.planning.shadow import fake_tensor, shadow
from lightning_unified.planning.trace import Take, Trace
from lightning_unified.training.levers import LossChunk, RecomputedBlocks
from lightning_unified.training.rehearsal.batch import Template
from lightning_unified.training.rehearsal.conductor import Conductor
from lightning_unified.training.rehearsal.kernels import KERNELS
from lightning_unified.training.rehearsal.stage import untouched
from lightning_unified.training.rehearsal.strategy import RehearsalStrategy, precision_of, shadow_precision
from lightning_unified.training.rehearsal.trainer import RehearsalTrainer, averaging, batches_of, tensors_held

__all__ = ["rehearse", "rehearse_validation"]


def rehearse(
    module: L.LightningModule,
    batch: Any,
    *,
    rows: int,
    parts: int = 1,
    later_rows: int | None = None,
    length: int | None = None,
    backend: str = "cpu",
    native: bool = False,
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
        native: Whether that backend is here, so that fakes can be on its device.
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
    rehearsal = _Rehearsal(
        module,
        batch,
        rows=rows,
        parts=parts,
        later_rows=later_rows,
        length=length,
        backend=backend,
        native=native,
        precision=precision or precision_of(trainer),
        recompute=recompute,
        kernel=optimizer_kernel,
        loss_chunk=loss_chunk,
        live=trainer,
    )
    return rehearsal.run(accumulate=accumulate, clip=clip)


def rehearse_validation(
    module: L.LightningModule,
    batch: Any,
    *,
    rows: int,
    length: int | None = None,
    backend: str = "cpu",
    native: bool = False,
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
        native: As for `rehearse`.
        precision: As for `rehearse`.
        trainer: As for `rehearse`.
        train_batch: As its `training_step` gets it, where that is another kind of batch; it has run before.

    Raises:
        RehearsalError: As for `rehearse`.
    """
    rehearsal = _Rehearsal(
        module,
        batch,
        rows=rows,
        parts=1,
        length=length,
        backend=backend,
        native=native,
        precision=precision or precision_of(trainer),
        recompute=None,
        kernel=None,
        loss_chunk=None,
        live=trainer,
    )
    return rehearsal.run(accumulate=1, clip=None, validates=True, train_batch=train_batch)


class _Rehearsal:
    """One rehearsal; the arguments are those of `rehearse`."""

    def __init__(
        self,
        module: L.LightningModule,
        batch: Any,
        *,
        rows: int,
        parts: int,
        later_rows: int | None = None,
        length: int | None,
        backend: str,
        native: bool,
        precision: str,
        recompute: RecomputePolicy | bool | None,
        kernel: str | None,
        loss_chunk: int | None,
        live: L.Trainer | None,
    ) -> None:
        if kernel is not None and kernel not in KERNELS:
            raise RehearsalError(f"optimizer_kernel={kernel!r}: give one of {', '.join(KERNELS)}, or None.")
        if rows < 1 or parts < 1:
            raise RehearsalError(f"rows={rows}, parts={parts}: give 1 or more of each.")
        self._module, self._batch, self._live = module, batch, live
        self._rows, self._parts, self._length = rows, parts, length
        self._later = rows if later_rows is None else later_rows
        self._backend, self._native = backend, native
        self._precision, self._recompute, self._kernel, self._loss_chunk = precision, recompute, kernel, loss_chunk
        self._device = torch.device("cuda", torch.cuda.current_device()) if native else torch.device("cpu")
        self._notes: list[str] = []

    def run(
        self, *, accumulate: int | None, clip: float | None, validates: bool = False, train_batch: Any = None
    ) -> Trace:
        """Rehearse, and return the trace; again with other answers, where made-up ones can have decided a shape."""
        settings = self._settings(accumulate, clip, validates=validates)
        template = Template(self._module, self._batch)
        before = template if train_batch is None else Template(self._module, train_batch)
        traced = partial(self._traced, template, settings, validates=validates, before=before)
        trace = self._guarded(traced)
        if trace.confidence != "low":
            return trace
        try:
            again = self._guarded(partial(traced, other=True))
        except RehearsalError:
            return trace
        if _sizes(again) != _sizes(trace):
            return trace
        return replace(trace, reads=tuple(replace(read, shapes=False) for read in trace.reads))

    def _guarded(self, traced: Callable[[], Trace]) -> Trace:
        """Return the trace, with the world around it as it was, or raise `RehearsalError`."""
        self._notes = []
        name = type(self._module).__name__
        try:
            with untouched():
                return traced()
        except RehearsalError:
            raise
        except LightningUnifiedError as error:
            raise RehearsalError(f"{name} cannot be rehearsed: {error}") from error
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise RehearsalError(
                f"{name} cannot be run without values ({type(error).__name__}: {reason}); what it needs must be measured on the device."
            ) from error

    def _traced(
        self,
        template: Template,
        settings: Mapping[str, Any],
        *,
        validates: bool,
        before: Template,
        other: bool = False,
    ) -> Trace:
        spot: list[Places] = []
        with fake_world(place=lambda: spot[0].here() if spot else "", other=other) as (_, answers):
            copy = self._shadow()
            spot.append(Places(copy))
            recorder = Recorder(
                backend=self._backend, native=self._native, place=spot[0].here, widths=_vocabularies(copy)
            )
            cut = None if self._parts == 1 else self._rows
            strategy = RehearsalStrategy(
                recorder, micro_batch_size=cut, kernel=self._kernel, backend=self._backend, device=self._device
            )
            conductor = Conductor(
                recorder,
                answers,
                strategy,
                make_batch=lambda validation: self._batch_of(
                    template if validation else before, parts=self._parts if strategy.steps else 1
                ),
                validates=validates,
                batches=batches_of(self._live),
            )
            self._fit(copy, conductor, strategy, settings, validates=validates, places=spot[0], recorder=recorder)
        if conductor.events is None:
            raise RehearsalError(f"the fit of {type(self._module).__name__} ended before a step was over.")
        if not conductor.wrote and not validates:
            self._notes.append("no weights were written in the step that was followed")
        return Trace(
            events=conductor.events,
            rows=self._rows,
            parts=self._parts,
            length=self._length or template.length,
            backend=self._backend,
            reads=tuple(answers.reads),
            notes=tuple(self._notes),
            options=self._options(),
        )

    def _fit(
        self,
        copy: L.LightningModule,
        conductor: Conductor,
        strategy: RehearsalStrategy,
        settings: Mapping[str, Any],
        *,
        validates: bool,
        places: Places,
        recorder: Recorder,
    ) -> None:
        on_host = self._backend == "cpu"
        held = list(tensors_held(self._live, on_host=on_host))
        conductor.held = [fake_tensor(one, device=self._device) for one in held]
        conductor.averages = [
            shadow(one, device=self._device, shared=self._shared()) for one in averaging(self._live, on_host=on_host)
        ]
        trainer = RehearsalTrainer(
            strategy,
            live=self._live,
            callbacks=[conductor, *conductor.averages],
            settings={**settings, "plugins": [self._plugin]},
        )
        loaders: dict[str, Any] = {"train_dataloaders": conductor.loader()}
        if validates:
            loaders["val_dataloaders"] = conductor.loader(validation=True)
        with places.followed(), recorder, nullcontext() if self._native else mimic(self._backend):
            trainer.fit(copy, **loaders)

    def _shadow(self) -> L.LightningModule:
        """Return the shadow, in the dtype and with the levers asked for."""
        module = self._module
        self._plugin, dtype = shadow_precision(self._precision, device_type=self._device.type)
        tensors = [*module.parameters(), *module.buffers()]
        cast = {} if dtype is None else {id(one): dtype for one in tensors if one.is_floating_point()}
        copy = shadow(module, device=self._device, cast=cast, shared=self._shared())
        copy.configure_callbacks = list  # type: ignore[method-assign]  # none that would write
        copy._metric_attributes = None  # Lightning's names of metrics, kept by their `id`
        for child in copy.modules():
            if "_device" in vars(child):
                child._device = self._device  # type: ignore[assignment]
        _pull(copy, self._recompute, self._loss_chunk)
        return copy

    def _batch_of(self, template: Template, *, parts: int) -> Any:
        return template.of(self._rows + (parts - 1) * self._later, length=self._length, device=self._device)

    def _shared(self) -> list[Any]:
        live = self._live
        return [] if live is None else [live, live.strategy, getattr(live, "datamodule", None)]

    def _settings(self, accumulate: int | None, clip: float | None, *, validates: bool) -> dict[str, Any]:
        """Return what the Trainer of the rehearsal takes from what was asked for and from the live one."""
        live = self._live
        settings: dict[str, Any] = {"limit_val_batches": 0}
        if validates:
            settings = {"val_check_interval": 1}
        if not self._module.automatic_optimization:
            return settings
        window = accumulate or (1 if live is None else live.accumulate_grad_batches)
        settings["accumulate_grad_batches"] = min(window, 2)  # a third batch of a window is as its second
        norm = clip if clip is not None else getattr(live, "gradient_clip_val", None)
        if norm is not None:
            settings["gradient_clip_val"] = norm
            settings["gradient_clip_algorithm"] = getattr(live, "gradient_clip_algorithm", None)
        return settings

    def _options(self) -> dict[str, str]:
        options = {
            "precision": self._precision,
            "recompute": self._recompute,
            "optimizer_kernel": self._kernel,
            "loss_chunk": self._loss_chunk,
        }
        return {name: str(value) for name, value in options.items() if value is not None}


def _sizes(trace: Trace) -> list[int]:
    return [event.bytes for event in trace.events if isinstance(event, Take)]


def _pull(copy: L.LightningModule, recompute: RecomputePolicy | bool | None, loss_chunk: int | None) -> None:
    """Set the shadow's levers as asked."""
    if recompute is not None:
        whole = RecomputePolicy(blocks="all" if recompute else 0)
        RecomputedBlocks(copy, recompute if isinstance(recompute, RecomputePolicy) else whole)
    if loss_chunk is not None:
        LossChunk(copy, loss_chunk)


def _vocabularies(module: nn.Module) -> set[int]:
    """Return the dimension that logits have: of the widest linear layer, where it is far wider than what it reads or as a table is long."""
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    tables = [table for table in module.modules() if isinstance(table, nn.Embedding)]
    widest = max(linear, key=lambda layer: layer.out_features, default=None)
    longest = max(tables, key=lambda table: table.num_embeddings, default=None)
    found: set[int] = set()
    if longest is not None and longest.num_embeddings > 4 * longest.embedding_dim:
        found.add(longest.num_embeddings)
    if widest is not None and widest.out_features > 4 * widest.in_features:
        found.add(widest.out_features)
    return found
