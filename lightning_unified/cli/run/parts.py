"""Build data, module, callbacks, loggers and Trainer of a run from its configuration."""

from collections.abc import Callable, Sequence
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

__all__ = ["Parts", "build", "callback_of", "callbacks_of", "count_parameters", "trainer_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of a run."""

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
    """Return the number of parameters.

    A module that keeps copies names its own by `own_parameters()`.
    """
    own = getattr(module, "own_parameters", module.parameters)
    return sum(parameter.numel() for parameter in own())


class _Start(Callback):
    """Call a function once strategy, data and checkpoint are set up.

    Their errors are printed first.
    """

    def __init__(self, then: Callable[[LightningModule], None]) -> None:
        self._then = then

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._then(pl_module)


class _ValidateAtEnd(Callback):
    """Validate after the last optimizer step of `max_steps` or `max_epochs`, for `best.ckpt`.

    Lightning validates every `val_check_interval` batches and skips a shorter rest. Its loop reads `trainer.val_check_batch` after each
    batch (`_TrainingEpochLoop._should_check_val_fx`, 2.6.6); this callback sets it to the last batch.
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
        config: The configuration, hardware settings resolved.
        resume_command: The command that a stopped run prints, to continue it.
        on_start: Called once everything is checked and set up, before the first batch.

    Raises:
        ConfigurationError: If a part refuses its arguments.
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
    """Return the callbacks of `config` by name, without those that a Trainer flag turns off.

    Raises:
        ConfigurationError: If a callback refuses its arguments.
    """
    callbacks = {name: make(f"callbacks.{name}", node) for name, node in _nodes(config.trainer.callbacks)}
    return {name: callback for name, callback in callbacks.items() if not _switched_off(callback, config.trainer)}


def trainer_of(config: DictConfig, callbacks: Sequence[Callback]) -> Trainer:
    """Return the Trainer of `config`, with `callbacks` in place of the configured ones.

    Raises:
        ConfigurationError: If the Trainer or a logger refuses its arguments.
    """
    loggers = [make(f"logger.{name}", node) for name, node in _nodes(config.trainer.logger)]
    taken = {"callbacks": list(callbacks), "logger": loggers or False}
    arguments = {key: value for key, value in _resolved(config.trainer).items() if key not in taken}
    return make("trainer", arguments, **taken)


def callback_of(parts: Parts, kind: str) -> Any:
    """Return the callback whose class is called `kind`, or None if the user left it out."""
    return next((callback for callback in parts.callbacks.values() if type(callback).__name__ == kind), None)


def _resolved(node: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(node, resolve=True)
    return {str(key): value for key, value in container.items()} if isinstance(container, dict) else {}


def _switched_off(callback: Callback, trainer: DictConfig) -> bool:
    """Return whether a flag of the Trainer turns `callback` off.

    Lightning raises for the pair instead.
    """
    bars = isinstance(callback, ProgressBar) and trainer.enable_progress_bar is False
    return bars or (isinstance(callback, Checkpoint) and trainer.enable_checkpointing is False)


def _nodes(group: Any) -> list[tuple[str, DictConfig]]:
    """Return the named nodes of a group that have a `_target_`; null and false mean none."""
    if not OmegaConf.is_dict(group):
        return []
    return [(str(name), node) for name, node in group.items() if OmegaConf.is_dict(node) and "_target_" in node]
