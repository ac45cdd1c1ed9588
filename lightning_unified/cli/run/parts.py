"""Build what a run consists of from its configuration: data, module, callbacks, loggers, trainer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_unified.cli.config.binding import make
from lightning_unified.cli.run.journal import Journal
from lightning_unified.cli.run.throughput import Throughput

__all__ = ["Parts", "build", "callback_of", "callbacks_of", "compiled", "count_parameters", "trainer_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a run consists of."""

    data: LightningDataModule
    module: LightningModule
    callbacks: dict[str, Callback]
    throughput: Throughput
    trainer: Trainer

    @property
    def parameters(self) -> int:
        """Parameters of the module, shared ones counted once."""
        return count_parameters(self.module)


def count_parameters(module: LightningModule) -> int:
    """Return how many parameters `module` has; one that keeps copies beside them names its own with `own_parameters()`."""
    own = getattr(module, "own_parameters", module.parameters)
    return sum(parameter.numel() for parameter in own())


class _Start(Callback):
    """Call back when strategy, data and checkpoint are in place: what they refuse is then said without anything before it."""

    def __init__(self, then: Callable[[LightningModule], None]) -> None:
        self._then = then

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._then(pl_module)


class _ValidateAtEnd(Callback):
    """Make a validation due at the last optimizer step that `max_steps` or `max_epochs` allows.

    Lightning validates every `val_check_interval` batches and drops what is left over. Its loop asks
    `trainer.val_check_batch` after each batch (`_TrainingEpochLoop._should_check_val_fx`, 2.6.6); this sets it so that the
    answer is yes after the last one.
    """

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        if trainer.check_val_every_n_epoch is None and trainer.global_step + 1 == trainer.estimated_stepping_batches:
            trainer.val_check_batch = loop.total_batch_idx + 1


def build(config: DictConfig, *, resume_command: str, on_start: Callable[[LightningModule], None]) -> Parts:
    """Build the parts of the run that `config` describes, seeded.

    `trainer.callbacks` and `trainer.logger` are groups of named nodes in the configuration and lists for the Trainer.

    Args:
        config: Resolved as far as the machine is concerned.
        resume_command: What a stopped run prints as the way to go on.
        on_start: Called once everything is checked and set up, before the first batch.

    Raises:
        ConfigurationError: If a part refuses what it was given.
    """
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    data = make("data", config.data)
    module = make("model", config.model)
    callbacks = callbacks_of(config)
    for callback in callbacks.values():
        if getattr(callback, "resume_command", ...) is None:
            callback.resume_command = resume_command
    throughput = Throughput()
    trainer = trainer_of(config, [_Start(on_start), *callbacks.values(), throughput, Journal(), _ValidateAtEnd()])
    return Parts(data=data, module=module, callbacks=callbacks, throughput=throughput, trainer=trainer)


def callbacks_of(config: DictConfig) -> dict[str, Any]:
    """Return the callbacks that `config` describes, by name, without those that a switch of the Trainer turns off.

    Raises:
        ConfigurationError: If one refuses what it was given.
    """
    callbacks = {name: make(f"callbacks.{name}", node) for name, node in _nodes(config.trainer.callbacks)}
    return {name: callback for name, callback in callbacks.items() if not _switched_off(callback, config.trainer)}


def trainer_of(config: DictConfig, callbacks: Sequence[Callback]) -> Trainer:
    """Return the Trainer that `config` describes, with `callbacks` in place of those it names.

    Raises:
        ConfigurationError: If it or a logger refuses what it was given.
    """
    loggers = [make(f"logger.{name}", node) for name, node in _nodes(config.trainer.logger)]
    taken = {"callbacks": list(callbacks), "logger": loggers or False}
    arguments = {key: value for key, value in _resolved(config.trainer).items() if key not in taken}
    return make("trainer", arguments, **taken)


@contextmanager
def compiled(module: LightningModule, *, wanted: bool) -> Iterator[None]:
    """Compile, meanwhile and in place, the modules that `module` consists of.

    Not `module` itself: its steps log, count and are called by a strategy, none of which a graph can hold. Not for
    longer than the training either: texts of every length would each be compiled for.
    """
    parts = list(module.children()) if wanted else []
    for part in parts:
        part.compile()
    try:
        yield
    finally:
        for part in parts:
            part._compiled_call_impl = None  # `Module.compile` has no opposite (torch 2.13)


def callback_of(parts: Parts, kind: str) -> Any:
    """Return the callback whose class is called `kind`, or None: a user may have left it out."""
    return next((callback for callback in parts.callbacks.values() if type(callback).__name__ == kind), None)


def _resolved(node: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(node, resolve=True)
    return {str(key): value for key, value in container.items()} if isinstance(container, dict) else {}


def _switched_off(callback: Callback, trainer: DictConfig) -> bool:
    """Return whether a switch of the Trainer means `callback`; Lightning refuses the pair instead of choosing."""
    bars = isinstance(callback, ProgressBar) and trainer.enable_progress_bar is False
    return bars or (isinstance(callback, Checkpoint) and trainer.enable_checkpointing is False)


def _nodes(group: Any) -> list[tuple[str, DictConfig]]:
    """Return the named nodes of a group that describe an object; null and false stand for none."""
    if not OmegaConf.is_dict(group):
        return []
    return [(str(name), node) for name, node in group.items() if OmegaConf.is_dict(node) and "_target_" in node]
