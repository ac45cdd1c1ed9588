"""The subject of a plan: a module without weights, its Trainer, and one batch."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_unified.cli.config.binding import make
from lightning_unified.cli.config.nearest import did_you_mean
from lightning_unified.cli.plan.arguments import Asked
from lightning_unified.cli.plan.example_batches import (
    batch_of_data,
    batch_of_shapes,
    batches_of_other_phases,
    describe_batch,
    largest_batch,
    rank_share,
    rows_of,
    validation_batch_of_data,
)
from lightning_unified.cli.plan.weightless import without_memory
from lightning_unified.cli.run import parts as building
from lightning_unified.errors import ConfigurationError

__all__ = ["Subject", "subject_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The module, Trainer and batch that are planned.

    Attributes:
        name: The model's name as requested.
        module: The module; its tensors take no memory.
        trainer: A Trainer with the callbacks, accumulation and clipping of the run, without logger and without our strategy.
        batch: The effective batch.
        batch_note: A note about the batch, or "".
        validation_batch: A validation batch, or None without a validation step or batch.
        other_batches: Whole batches of other phases of the same fit, by name.
    """

    name: str
    module: LightningModule
    trainer: Trainer
    batch: Any
    batch_note: str = ""
    validation_batch: Any = None
    other_batches: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Parameters of the module, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def rows(self) -> int | None:
        """Rows of the batch, None if unknown."""
        return rows_of(self.batch)

    @property
    def description(self) -> str:
        """The module in one line."""
        return f"{type(self.module).__name__}, {self.parameters:,} parameters"

    @property
    def batch_description(self) -> str:
        """The batch in one line."""
        return f"{describe_batch(self.batch)}{self.batch_note and '; '}{self.batch_note}"


def subject_of(asked: Asked, config: DictConfig, *, precision: str, ranks: int = 1) -> Subject:
    """Return the subject that `config` describes; flags replace its model and data.

    Of `ranks` devices that share the batches of a model's own data, the subject is one.

    Raises:
        ConfigurationError: If a part refuses its arguments, or is of the wrong type.
    """
    planned = _without_a_run(config, precision=precision)
    trainer = building.trainer_of(planned, list(building.callbacks_of(planned).values()))
    batch = _given_batch(asked)
    if asked.module is not None:
        target = _object(asked.module, flag="--module")
        arguments = _arguments(asked.kwargs, target, asked.module)
        module = without_memory(lambda: _made(target, arguments, f"--module {asked.module}"), what=asked.module)
        return Subject(name=asked.module.rpartition(":")[2], module=module, trainer=trainer, batch=batch)
    module = without_memory(lambda: make("model", planned.model), what=f"model={config.name}")
    note, validation, others = "", None, {}
    if batch is None:
        data = make("data", planned.data)
        batch, note = batch_of_data(data)
        # Other data give each rank batches of its own, as Lightning does.
        shared = ranks if hasattr(data, "example_batch") else 1
        batch = rank_share(batch, shared)
        others = {name: rank_share(other, shared) for name, other in batches_of_other_phases(data).items()}
        if is_overridden("validation_step", module, LightningModule) and trainer.limit_val_batches:
            validation = rank_share(validation_batch_of_data(data), shared)
        if not hasattr(data, "example_batch"):  # a data module with it is not set up, so the dry run must not use it
            setattr(trainer, "datamodule", data)  # noqa: B010 - Lightning sets it here, undeclared
    return Subject(
        name=str(config.name),
        module=module,
        trainer=trainer,
        batch=largest_batch(module, batch),
        batch_note=note,
        validation_batch=validation,
        other_batches={name: largest_batch(module, other) for name, other in others.items()},
    )


def _without_a_run(config: DictConfig, *, precision: str) -> DictConfig:
    """Return `config` for a plan on the CPU, without loggers and checkpoints.

    Of the callbacks it keeps the user's. Their interpolations are resolved first, because they may refer to those that are left out.
    """
    planned = config.copy()
    callbacks = OmegaConf.to_container(config.callbacks, resolve=True) if config.callbacks else {}
    users = {
        name: node
        for name, node in (callbacks.items() if isinstance(callbacks, dict) else ())
        if isinstance(node, dict) and not str(node.get("_target_", "")).startswith("lightning_unified.")
    }
    with open_dict(planned):
        planned.callbacks = users
        planned.logger = None
        planned.trainer.update(
            accelerator="cpu",
            strategy="auto",
            devices=1,
            num_nodes=1,
            precision=precision,
            enable_progress_bar=False,
            enable_checkpointing=False,
            fast_dev_run=False,
            profiler=None,
        )
    return planned


def _given_batch(asked: Asked) -> Any:
    """Return the batch that the flags define, or None."""
    if asked.batch_shape:
        return batch_of_shapes(asked.batch_shape)
    if asked.batch is None:
        return None
    found = _object(asked.batch, flag="--batch")
    batch = found() if callable(found) else found
    if rows_of(batch) is None:
        raise ConfigurationError(f"--batch {asked.batch}: a {type(batch).__name__} without tensors is no batch.")
    return batch


def _object(path: str, *, flag: str) -> Any:
    """Import the object that `pkg.mod:name` or `file.py:name` names."""
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise ConfigurationError(f"{flag} {path}: write pkg.mod:Name or file.py:Name, with a colon before the name.")
    module = _file(where, flag) if where.endswith(".py") else _imported(where, flag)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{flag} {path}: {where} has no {part}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    return found


def _imported(name: str, flag: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"{flag} {name}: it cannot be imported from {Path.cwd()} ({error}); install it, change to its folder, or name its file."
        ) from error


def _file(name: str, flag: str) -> Any:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigurationError(f"{flag} {name}: there is no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{flag} {name}: Python cannot load it as a module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _arguments(pairs: Sequence[str], target: Callable[..., Any], path: str) -> dict[str, Any]:
    """Parse `key=value` pairs as arguments of `target`, values as YAML.

    Refuse unknown keys with the nearest.
    """
    arguments = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigurationError(
                f"--kwargs {pair}: write key=value, as in width=512; overrides stand before this flag."
            )
        arguments[key] = yaml.safe_load(value)
    try:
        takes = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return arguments
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        return arguments
    for key in arguments:
        if key not in takes:
            raise ConfigurationError(
                f"--kwargs {key}: {path} takes no such argument{did_you_mean(key, takes)} Overrides stand before this flag."
            )
    return arguments


def _made(target: Any, arguments: dict[str, Any], path: str) -> LightningModule:
    if isinstance(target, LightningModule):
        return target
    if not callable(target):
        raise ConfigurationError(f"{path}: a {type(target).__name__} is neither a LightningModule nor makes one.")
    try:
        module = target(**arguments)
    except TypeError as error:
        raise ConfigurationError(f"{path}: {error}; give its arguments with --kwargs key=value.") from error
    if not isinstance(module, LightningModule):
        raise ConfigurationError(
            f"{path}: it makes a {type(module).__name__}, and a plan needs a LightningModule, whose training_step and "
            "configure_optimizers say what a step is."
        )
    return module
