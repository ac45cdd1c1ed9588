"""The fit of a fake copy, with its memory options, Trainer, strategy and recorder."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import precision as stock
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from typing_extensions import override

from lightning_unified.cost_model.backends import mimic
from lightning_unified.errors import DryRunError
from lightning_unified.nn.attention import ChunkedAttention
from lightning_unified.nn.compiled import is_compiled
from lightning_unified.nn.cross_entropy.row_parts import repeated_once
from lightning_unified.nn.module_tree.walks import modules_of
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import CheckpointedBlocks, LossChunk
from lightning_unified.options.loss_chunk import chunk_of
from lightning_unified.planner.dry_run.compiled_parts import run_as_compiled
from lightning_unified.planner.dry_run.counters import Counters
from lightning_unified.planner.dry_run.fake_batch import Template
from lightning_unified.planner.dry_run.fake_module import fake_module, vocabularies
from lightning_unified.planner.dry_run.recording import RecordingCallback
from lightning_unified.planner.dry_run.spec import StepSize, StepSpec
from lightning_unified.planner.dry_run.strategy import DryRunStrategy
from lightning_unified.planner.dry_run.trainer import DryRunTrainer, averaging, batches_of, tensors_held
from lightning_unified.planner.fake.fake_copy import fake_copy, fake_tensor
from lightning_unified.planner.fake.mode import World
from lightning_unified.planner.fake.places import Places
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.planner.ranks.sharded_copy import shard_copy, sharding_followed
from lightning_unified.planner.repeats import Replay, Twins
from lightning_unified.precision import MixedPrecision
from lightning_unified.step.split import splitter_of
from lightning_unified.step.split.rules import given_to, rules_of

__all__ = ["FakeFit", "Templates"]

_CASTS = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_DEVICE = torch.device("cpu")  # of all fake tensors: those of other devices fail in the backward pass


class Templates:
    """The templates of a step's batches.

    Create them outside the fake world, because they look at real tensors.

    Attributes:
        traced: The template of batches of the traced stage.
        train: The template of training batches.
        has_encoders: Whether the step runs whole, with only the module's encoders in micro-batches.
        roles: The roles of the batches' entries, by stage.
    """

    def __init__(self, spec: StepSpec) -> None:
        self.traced = self.train = _template(spec, spec.batch, "validate" if spec.validates else "fit")
        rules = rules_of(spec.module, "fit", given=given_to(spec.trainer))
        self.has_encoders = bool(rules.encoders) and not spec.validates
        if spec.train_batch is not None:
            self.train = _template(spec, spec.train_batch, "fit")
        self.roles = {"fit": self.train.roles, "validate": self.traced.roles}


class FakeFit:
    """A fit of a fake copy, from its set-up to any number of traced steps.

    Create and run it inside `fake_world(world)`.

    Args:
        size: The size of the first step to trace.
        twins: The module's repeated blocks, of which only a few are traced; None traces all blocks.

    Attributes:
        size: The size of the step that is traced next.
        world: As given.
        recording: Starts and ends the recording, and holds its result.
        strategy: The strategy of the dry run.
        trainer: The Trainer of the dry run.
        attends: Whether the step called torch's attention with gradients.
    """

    def __init__(
        self,
        spec: StepSpec,
        templates: Templates,
        size: StepSize,
        *,
        recompute: RecomputePolicy | bool | None,
        world: World,
        twins: Twins | None = None,
    ) -> None:
        self._spec, self._templates, self.size, self.world = spec, templates, size, world
        self._settings, self.attends = spec.trainer_settings(), False
        plugin, dtype = _fake_copy_precision(spec.precision, device_type=_DEVICE.type)
        self._copy = fake_module(spec, self._shared(), dtype, device=_DEVICE)
        self._places = Places(self._copy)
        world.place = self._places.here
        self._recorder = Recorder(
            backend=spec.backend, place=self._places.here, widths=vocabularies(self._copy), known=world.known
        )
        world.live = partial(len, self._recorder.storages.live)
        if spec.compiled:
            run_as_compiled(self._copy, spec.module, self._recorder, sharded=spec.sharding is not None)
        self._shards = None if spec.sharding is None else shard_copy(self._copy, spec.sharding, self._recorder)
        self._recomputed: CheckpointedBlocks | None = None
        self.recompute(recompute)
        self._chunk: LossChunk | None = None
        self._set_chunk()
        self.strategy = self._new_strategy()
        self.recording = RecordingCallback(
            self._recorder,
            world.answers,
            self.strategy,
            make_batch=lambda validation: self._batch(validation=validation),
            validates=spec.validates,
            batches=batches_of(spec.trainer),
        )
        if twins is not None and _may_skip(spec, self._copy, twins):
            self._replay_blocks(twins)
        self._copy_callbacks()
        self.trainer = DryRunTrainer(
            self.strategy,
            live=spec.trainer,
            callbacks=[self.recording, *self.recording.averages],
            settings={**self._settings, "plugins": [plugin]},
        )
        self.recording.counters = Counters(self._copy, self.trainer, world.answers)

    def run(self) -> None:
        """Fit the fake copy until the recording of one step ends."""
        loaders: dict[str, Any] = {"train_dataloaders": self.recording.loader()}
        if self._spec.validates:
            loaders["val_dataloaders"] = self.recording.loader(validation=True)
        with self._followed():
            self.trainer.fit(self._copy, **loaders)

    def go_on(
        self,
        spec: StepSpec,
        templates: Templates,
        size: StepSize,
        *,
        recompute: RecomputePolicy | bool | None,
        twins: Twins,
    ) -> None:
        """Go on until the recording of one more step ends.

        Args:
            spec: The step, whose memory options apply from now on.
            templates: The templates of its batches.
            size: Its size.
            recompute: The blocks that recompute their activations, as for `recompute`.
            twins: The module's repeated blocks under these options.
        """
        self.strategy.policy.batches.known_roles = dict(templates.roles)
        self._spec, self._templates, self.size = spec, templates, size
        self.recording.go_on()
        self.recompute(recompute)
        self._set_chunk()
        if self.recording.replay is not None:
            self.recording.replay.use(twins)
        self.strategy.split(size.micro_batch_size, num_micro_batches=size.num_micro_batches)
        with self._followed():
            self.trainer.go_on()

    def _set_chunk(self) -> None:
        """Set the step's loss chunk, or the module's: the heads of a copy have their own forward."""
        rows = self._spec.loss_chunk or chunk_of(self._spec.module)
        if self._chunk is not None:
            if self._chunk.rows == rows:
                return
            self._chunk.undo()
        self._chunk = None if rows is None else LossChunk(self._copy, rows)

    def recompute(self, policy: RecomputePolicy | bool | None) -> None:
        """Set the blocks of the fake copy that recompute their activations.

        A policy of None leaves the module as it is.
        """
        if self._recomputed is not None:
            self._recomputed.undo()
        if isinstance(policy, bool):
            policy = RecomputePolicy(blocks="all" if policy else 0)
        self._recomputed = None if policy is None else CheckpointedBlocks(self._copy, policy)

    @property
    def recomputed_blocks(self) -> int:
        """Number of blocks that run again in the backward pass."""
        return 0 if self._recomputed is None else self._recomputed.count

    @property
    def length(self) -> int | None:
        """Positions of a row; None where rows are no sequences."""
        return self.size.length or self._spec.length or self._templates.traced.length

    @property
    def has_skipped(self) -> bool:
        """Whether a block did not run in the step that is traced."""
        return self.recording.replay is not None and self.recording.replay.has_skipped

    @property
    def can_go_on(self) -> bool:
        """Whether further steps may be traced on this copy.

        That needs steps that do not differ from each other, and nothing to tear down.
        """
        datamodule = getattr(self._spec.trainer, "datamodule", None)
        return (
            not self._spec.validates
            and self._copy.automatic_optimization
            and self._spec.precision != "16-mixed"  # its scaler counts steps too
            and self.recording.wrote
            and not self.recording.averages
            and self._settings.get("accumulate_grad_batches", 1) == 1
            and not is_overridden("teardown", self._copy)
            and (datamodule is None or not is_overridden("teardown", datamodule, L.LightningDataModule))
            and self.recording.is_steady
        )

    def _replay_blocks(self, twins: Twins) -> None:
        replay = Replay(self._copy, self._recorder, twins)
        self._places.replay, self.recording.replay = replay.called, replay
        self.strategy.backward_has_ended = replay.outside

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        attention = ChunkedAttention(self._copy) if self._spec.attention else None
        noted = contextlib.nullcontext() if self._spec.sharding is None else sharding_followed(self._recorder)
        try:
            with noted, self._places.followed(), self._repeated(), self._recorder, mimic(self._spec.backend) as called:
                yield
            self.attends = "scaled_dot_product_attention" in called
        finally:
            if attention is not None:
                attention.remove()

    def _repeated(self) -> contextlib.AbstractContextManager[None]:
        """Run one part of a loss in place of many; all of them for a CPU, whose heap gets other holes with each."""
        if self._spec.backend == "cpu":
            return contextlib.nullcontext()
        return repeated_once(self._recorder.repeated, whole_chunks=self._spec.whole_chunks)

    def _new_strategy(self) -> DryRunStrategy:
        strategy = DryRunStrategy(
            self._recorder,
            micro_batch_size=self.size.micro_batch_size,
            kernel=self._spec.optimizer_kernel,
            backend=self._spec.backend,
            device=_DEVICE,
            micro_batches=given_to(self._spec.trainer),
            roles=self._templates.roles,
            is_prepared=self._spec.is_prepared,
            copies_weights=_copies_weights(self._spec),
            shards=self._shards,
        )
        strategy.policy.most_chunks = self.size.num_micro_batches
        return strategy

    def _copy_callbacks(self) -> None:
        """Copy tensors that live callbacks hold, and the callbacks that average weights."""
        live, on_host = self._spec.trainer, self._spec.backend == "cpu"
        self.recording.held = [fake_tensor(one, device=_DEVICE) for one in list(tensors_held(live, on_host=on_host))]
        self.recording.averages = [
            fake_copy(one, device=_DEVICE, shared=self._shared()) for one in averaging(live, on_host=on_host)
        ]

    def _batch(self, *, validation: bool) -> Any:
        """Return the next batch; it is one micro-batch until weights have been written once."""
        templates = self._templates
        template = templates.traced if validation or not self._spec.validates else templates.train
        size, length = self.size, self.size.length or self._spec.length
        num_micro_batches = size.num_micro_batches if self.strategy.steps else 1
        if num_micro_batches > 1 and templates.has_encoders:  # the step runs whole, and only its encoders in chunks
            return template.of(template.rows or 1, length=length, device=_DEVICE)
        return template.of(size.rows + (num_micro_batches - 1) * size.later_rows, length=length, device=_DEVICE)

    def _shared(self) -> list[Any]:
        """Return the live objects that the copy shares with the module."""
        live = self._spec.trainer
        return [] if live is None else [live, live.strategy, getattr(live, "datamodule", None)]


def _may_skip(spec: StepSpec, copy: L.LightningModule, twins: Twins) -> bool:
    """Return whether blocks may be skipped.

    Nothing of the module may be compiled or sharded, and Lightning must run the backward pass. A validation step does not show which blocks are twins.
    """
    compiled = any(is_compiled(one) for one in modules_of(spec.module))
    known = bool(twins.runs) or not spec.validates
    return known and not compiled and spec.sharding is None and copy.automatic_optimization


def _template(spec: StepSpec, batch: Any, stage: str) -> Template:
    """Return the template of batches of `stage`, with rows where the live run has found them."""
    rules = rules_of(spec.module, stage, given=given_to(spec.trainer))
    return Template(spec.module, batch, rules, splitter=splitter_of(spec.module, stage, trainer=spec.trainer))


def _copies_weights(spec: StepSpec) -> bool:
    """Return whether the strategy copies weights and optimizer state around each step."""
    if spec.optimizer_rollback is not None:
        return spec.optimizer_rollback
    options = getattr(getattr(getattr(spec.trainer, "strategy", None), "policy", None), "options", None)
    sharding = spec.sharding
    by_default = sharding is not None and sharding.hold is not None and sharding.mesh is None
    return by_default or (options is not None and options.recover and options.optimizer_rollback)


def _fake_copy_precision(precision: str, *, device_type: str) -> tuple[stock.Precision, torch.dtype | None]:
    """Return the precision plugin of a dry run, and the dtype of the fake copy.

    A dtype of None keeps each tensor's own.

    Raises:
        DryRunError: If the precision cannot be traced.
    """
    if precision in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(precision, device_type=device_type), None
    if precision in ("bf16-true", "16-true"):
        return _Half(precision), _CASTS[precision]  # pyright: ignore[reportArgumentType]
    if precision == "64-true":
        return stock.DoublePrecision(), _CASTS[precision]
    if precision == "32-true":
        return stock.Precision(), None
    raise DryRunError(
        f"precision {precision!r} cannot be traced; choose from 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true, 64-true."
    )


class _Half(stock.HalfPrecision):
    """Half precision without a conversion: the fake copy is made in that dtype."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module
