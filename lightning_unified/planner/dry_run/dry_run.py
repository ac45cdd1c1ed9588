"""One dry run: the fake copy and its Trainer, set up once, and the steps of it that are followed."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_unified.cost_model.backends import mimic
from lightning_unified.cost_model.trace.trace import Take, Trace
from lightning_unified.errors import DryRunError, LightningUnifiedError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import CheckpointedBlocks, LossChunk
from lightning_unified.planner.dry_run.batch import Template
from lightning_unified.planner.dry_run.conductor import Conductor
from lightning_unified.planner.dry_run.counters import Counters
from lightning_unified.planner.dry_run.kernels import KERNELS
from lightning_unified.planner.dry_run.stage import untouched
from lightning_unified.planner.dry_run.strategy import DryRunStrategy, fake_copy_precision
from lightning_unified.planner.dry_run.trainer import DryRunTrainer, averaging, batches_of, tensors_held
from lightning_unified.planner.fake.fake_copy import fake_copy, fake_tensor
from lightning_unified.planner.fake.mode import World, fake_world
from lightning_unified.planner.fake.places import Places
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.step.split import splitter_of
from lightning_unified.step.split.rules import given_to, rules_of
from lightning_unified.step.undo import EVALUATION_STEPS, TRAINING_STEP, StateWatch, roots_of

__all__ = ["DryRun"]

_DEVICE = torch.device("cpu")  # of the fakes, whatever the backend: those of other devices fail in the backward pass


@dataclass(kw_only=True)
class _Stage:
    """What stands when a first step has been followed, and the size of the step that was last."""

    world: World
    copy: L.LightningModule
    places: Places
    recorder: Recorder
    strategy: DryRunStrategy
    conductor: Conductor
    trainer: DryRunTrainer
    rows: int
    parts: int
    later_rows: int


class DryRun:
    """A fit of a fake copy; the arguments are those of `trace_step` and `trace_validation`."""

    def __init__(
        self,
        module: L.LightningModule,
        batch: Any,
        *,
        backend: str,
        precision: str,
        live: L.Trainer | None,
        recompute: RecomputePolicy | bool | None = None,
        kernel: str | None = None,
        loss_chunk: int | None = None,
        length: int | None = None,
        accumulate: int | None = None,
        clip: float | None = None,
        validates: bool = False,
        train_batch: Any = None,
        is_prepared: bool = False,
    ) -> None:
        if kernel is not None and kernel not in KERNELS:
            raise DryRunError(f"optimizer_kernel={kernel!r}: give one of {', '.join(KERNELS)}, or None.")
        self._module, self._live, self._length = module, live, length
        self._backend, self._precision, self._validates = backend, precision, validates
        self._recompute, self._kernel, self._loss_chunk = recompute, kernel, loss_chunk
        stage = "validate" if validates else "fit"
        self._template = self._before = _template(module, batch, stage, live=live)
        self._is_prepared = is_prepared
        self._has_encoders = bool(rules_of(module, "fit", given=given_to(live)).encoders) and not validates
        if train_batch is not None:
            self._before = _template(module, train_batch, "fit", live=live)
        self._settings = self._settings_of(accumulate, clip)
        self._memory_option: CheckpointedBlocks | None = None
        self._stage: _Stage | None = None
        # the fake copy shares the user's objects, globals and closure variables, in which a step may leave fake tensors
        self._state = StateWatch(partial(roots_of, module, live, (*TRAINING_STEP, *EVALUATION_STEPS)), tensors=False)

    def run(self, rows: int, parts: int = 1, later_rows: int | None = None) -> Trace:
        """Trace, and return the trace; again with other answers, where made-up ones can have decided a shape.

        Raises:
            DryRunError: As `trace_step`.
        """
        if rows < 1 or parts < 1:
            raise DryRunError(f"rows={rows}, parts={parts}: give 1 or more of each.")
        later = rows if later_rows is None else later_rows
        trace = self._guarded(partial(self._first, rows, parts, later))
        if trace.confidence != "low":
            return trace
        self._stage = None
        try:
            again = self._guarded(partial(self._first, rows, parts, later, other=True))
        except DryRunError:
            return trace
        finally:
            self._stage = None
        if _sizes(again) != _sizes(trace):
            return trace
        return replace(trace, reads=tuple(replace(read, shapes=False) for read in trace.reads))

    def go_on(
        self, rows: int, parts: int, later_rows: int | None = None, *, recompute: RecomputePolicy | bool | None = None
    ) -> Trace | None:
        """Follow one more step where the last one ended, with every counter set back to what it was before the first one followed.

        What is recomputed may be something else by now: it decides what lives within a step, and of what lives between two no more than
        the order in which it began to.

        It is the step that a dry run of its own would follow, if that would find the same as this one does. So what lives before it
        must be, byte for byte and in the same order within each category, what lived before the first step that was followed; and so
        must be what lives after it, which shows that the size of a step does not decide what the next one finds. States that
        grow, tensors of a batch that are kept and gradients that come in another order all show there.

        Returns:
            Its trace; None if it is to be traced by itself.
        """
        stage, self._stage = self._stage, None
        if stage is None:
            return None
        self._recompute = recompute
        with contextlib.suppress(DryRunError):
            trace = self._guarded(
                partial(self._further, stage, rows, parts, rows if later_rows is None else later_rows)
            )
            if trace.confidence != "low" and stage.conductor.is_steady:
                self._stage = stage
                return trace
        return None

    def _guarded(self, traced: Callable[[], Trace]) -> Trace:
        """Return the trace, with the world around it as it was, or raise `DryRunError`."""
        name, noted = type(self._module).__name__, self._state.note()
        try:
            with untouched():
                return traced()
        except DryRunError:
            raise
        except LightningUnifiedError as error:
            raise DryRunError(f"{name} cannot be traced: {error}") from error
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise DryRunError(
                f"{name} cannot be run without values ({type(error).__name__}: {reason}); what it needs must be measured on the device."
            ) from error
        finally:
            noted.restore()

    def _first(self, rows: int, parts: int, later: int, *, other: bool = False) -> Trace:
        spot: list[Places] = []
        world = World(place=lambda: spot[0].here() if spot else "", other=other)
        with fake_world(world):
            stage = self._set_up(rows, parts, later, world=world, spot=spot)
            loaders: dict[str, Any] = {"train_dataloaders": stage.conductor.loader()}
            if self._validates:
                loaders["val_dataloaders"] = stage.conductor.loader(validation=True)
            with self._followed(stage):
                stage.trainer.fit(stage.copy, **loaders)
        trace = self._trace(stage)
        if self._can_go_on(stage):
            self._stage = stage
        return trace

    def _further(self, stage: _Stage, rows: int, parts: int, later: int) -> Trace:
        stage.rows, stage.parts, stage.later_rows = rows, parts, later
        with fake_world(stage.world):
            stage.conductor.go_on()
            self._recompute_as_asked(stage.copy)
            stage.strategy.cut(None if parts == 1 else rows, parts=parts)
            with self._followed(stage):
                stage.trainer.go_on()
        return self._trace(stage)

    @contextlib.contextmanager
    def _followed(self, stage: _Stage) -> Iterator[None]:
        with stage.places.followed(), stage.recorder, mimic(self._backend):
            yield

    def _set_up(self, rows: int, parts: int, later: int, *, world: World, spot: list[Places]) -> _Stage:
        """Return the fake copy and all that follows it; call it inside the world."""
        plugin, dtype = fake_copy_precision(self._precision, device_type=_DEVICE.type)
        copy = self._fake_copy(dtype)
        spot.append(Places(copy))
        recorder = Recorder(backend=self._backend, place=spot[0].here, widths=_vocabularies(copy))
        strategy = DryRunStrategy(
            recorder,
            micro_batch_size=None if parts == 1 else rows,
            kernel=self._kernel,
            backend=self._backend,
            device=_DEVICE,
            micro_batches=given_to(self._live),
            roles={"fit": self._before.roles, "validate": self._template.roles},
            is_prepared=self._is_prepared,
        )
        strategy.policy.most_chunks = parts
        conductor = Conductor(
            recorder,
            world.answers,
            strategy,
            make_batch=lambda validation: self._batch(stage, validation=validation),
            validates=self._validates,
            batches=batches_of(self._live),
        )
        self._bring_along(conductor)
        trainer = DryRunTrainer(
            strategy,
            live=self._live,
            callbacks=[conductor, *conductor.averages],
            settings={**self._settings, "plugins": [plugin]},
        )
        conductor.counters = Counters(copy, trainer, world.answers)
        stage = _Stage(
            world=world,
            copy=copy,
            places=spot[0],
            recorder=recorder,
            strategy=strategy,
            conductor=conductor,
            trainer=trainer,
            rows=rows,
            parts=parts,
            later_rows=later,
        )
        return stage

    def _bring_along(self, conductor: Conductor) -> None:
        """Let the conductor have what the live Trainer's callbacks hold and average."""
        on_host = self._backend == "cpu"
        held = list(tensors_held(self._live, on_host=on_host))
        conductor.held = [fake_tensor(one, device=_DEVICE) for one in held]
        conductor.averages = [
            fake_copy(one, device=_DEVICE, shared=self._shared()) for one in averaging(self._live, on_host=on_host)
        ]

    def _fake_copy(self, dtype: torch.dtype | None) -> L.LightningModule:
        """Return the fake copy, in the dtype and with the memory options asked for."""
        module = self._module
        tensors = [*module.parameters(), *module.buffers()]
        cast = {} if dtype is None else {id(one): dtype for one in tensors if one.is_floating_point()}
        copy = fake_copy(module, device=_DEVICE, cast=cast, shared=self._shared())
        copy.configure_callbacks = list  # type: ignore[method-assign]  # none that would write
        copy._metric_attributes = None  # Lightning's names of metrics, kept by their `id`
        for child in copy.modules():
            if "_device" in vars(child):
                child._device = _DEVICE  # type: ignore[assignment]
        self._memory_option = None
        self._recompute_as_asked(copy)
        if self._loss_chunk is not None:
            LossChunk(copy, self._loss_chunk)
        return copy

    def _recompute_as_asked(self, copy: L.LightningModule) -> None:
        if self._memory_option is not None:
            self._memory_option.undo()
        policy = self._recompute
        if isinstance(policy, bool):
            policy = RecomputePolicy(blocks="all" if policy else 0)
        self._memory_option = None if policy is None else CheckpointedBlocks(copy, policy)

    def _batch(self, stage: _Stage, *, validation: bool) -> Any:
        """Return the next batch: whole until weights have been written once."""
        template = self._template if validation or not self._validates else self._before
        parts = stage.parts if stage.strategy.steps else 1
        if parts > 1 and self._has_encoders:  # runs whole, its encoders in chunks
            return template.of(template.rows or 1, length=self._length, device=_DEVICE)
        return template.of(stage.rows + (parts - 1) * stage.later_rows, length=self._length, device=_DEVICE)

    def _shared(self) -> list[Any]:
        live = self._live
        return [] if live is None else [live, live.strategy, getattr(live, "datamodule", None)]

    def _settings_of(self, accumulate: int | None, clip: float | None) -> dict[str, Any]:
        """Return what the Trainer of the dry run takes from what was asked for and from the live one."""
        live = self._live
        settings: dict[str, Any] = {"val_check_interval": 1} if self._validates else {"limit_val_batches": 0}
        if not self._module.automatic_optimization:
            return settings
        window = accumulate or (1 if live is None else live.accumulate_grad_batches)
        settings["accumulate_grad_batches"] = min(window, 2)  # a third batch of a window is as its second
        norm = clip if clip is not None else getattr(live, "gradient_clip_val", None)
        if norm is not None:
            settings["gradient_clip_val"] = norm
            settings["gradient_clip_algorithm"] = getattr(live, "gradient_clip_algorithm", None)
        return settings

    def _can_go_on(self, stage: _Stage) -> bool:
        """Return whether further steps may be followed: none of what happens in some steps only, or is to be taken down."""
        datamodule = getattr(self._live, "datamodule", None)
        return (
            not self._validates
            and stage.copy.automatic_optimization
            and self._precision != "16-mixed"  # its scaler counts steps too
            and stage.conductor.wrote
            and not stage.conductor.averages
            and self._settings.get("accumulate_grad_batches", 1) == 1
            and not is_overridden("teardown", stage.copy)
            and (datamodule is None or not is_overridden("teardown", datamodule, L.LightningDataModule))
            and stage.conductor.is_steady
        )

    def _trace(self, stage: _Stage) -> Trace:
        conductor = stage.conductor
        if conductor.events is None:
            raise DryRunError(f"the fit of {type(self._module).__name__} ended before a step was over.")
        unwritten = not conductor.wrote and not self._validates
        return Trace(
            events=conductor.events,
            rows=stage.rows,
            parts=stage.parts,
            length=self._length or self._template.length,
            backend=self._backend,
            reads=tuple(stage.world.answers.reads),
            notes=("no weights were written in the step that was followed",) if unwritten else (),
            options=self._options(),
        )

    def _options(self) -> Mapping[str, str]:
        options = {
            "precision": self._precision,
            "recompute": self._recompute,
            "optimizer_kernel": self._kernel,
            "loss_chunk": self._loss_chunk,
        }
        return {name: str(value) for name, value in options.items() if value is not None}


def _template(module: L.LightningModule, batch: Any, stage: str, *, live: L.Trainer | None) -> Template:
    """Return what batches of `stage` look like, with rows where the live run has found them."""
    rules = rules_of(module, stage, given=given_to(live))
    return Template(module, batch, rules, splitter=splitter_of(module, stage, trainer=live))


def _sizes(trace: Trace) -> list[int]:
    return [event.bytes for event in trace.events if isinstance(event, Take)]


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
