"""Make the machine ready before anything slow: hardware found, environment set, threads set, budget settled."""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, fields

import torch
from omegaconf import DictConfig, open_dict

from lightning_unified.cli.request.binding import make
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware import (
    Budget,
    HardwareSettings,
    Reading,
    capabilities,
    prepare_allocators,
    read,
    require,
    resolve_budget,
)

__all__ = ["Machine", "check_numbers", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a run has to work with.

    Args:
        reading: The pool before anything was allocated.
        settings: The hardware settings, nothing left to choose.
        budget: Bytes this run may use.
    """

    reading: Reading
    settings: HardwareSettings
    budget: Budget


def prepare(config: DictConfig) -> Machine:
    """Check and ready the machine for `config`, and write the settled hardware settings into it.

    Raises:
        HardwareError: If the hardware asked for is not here.
        BudgetError: If the budget exceeds the pool.
    """
    settings: HardwareSettings = make("hardware", config.hardware)
    prepare_allocators(config.memory.budget)
    require(settings.name)
    reading = read("cpu" if settings.accelerator == "cpu" else "auto")
    budget = resolve_budget(config.memory.budget, reading)
    settings = settings.resolve(reading, capabilities(reading.device))
    with open_dict(config):
        config.hardware.update({field.name: getattr(settings, field.name) for field in fields(settings)})
    _set_threads(int(settings.host_threads), os.environ)
    return Machine(reading=reading, settings=settings, budget=budget)


def _set_threads(count: int, environ: MutableMapping[str, str]) -> None:
    """Use `count` threads here and in child processes; a number that the user exported stays."""
    torch.set_num_threads(int(environ.setdefault("OMP_NUM_THREADS", str(count))))


def check_numbers(config: DictConfig) -> None:
    """Refuse counts that cannot be, before anything slow is started.

    Raises:
        ConfigurationError: Naming the key.
    """
    seed = config.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32):
        raise ConfigurationError(f"seed={seed}: it is a whole number from 0 to {2**32 - 1}.")
    batch = config.data.get("batch_size")
    if isinstance(batch, int) and batch < 1:
        raise ConfigurationError(f"data.batch_size={batch}: the effective batch is a count of rows, 1 or more.")
    rows = config.memory.micro_batch_size
    if isinstance(rows, int) and rows < 1:
        raise ConfigurationError(f"memory.micro_batch_size={rows}: it is a count of rows, 1 or more, or auto.")
    if isinstance(rows, str) and rows != "auto":
        raise ConfigurationError(f"memory.micro_batch_size={rows}: it is a whole number or auto.")
    steps, epochs = config.trainer.max_steps, config.trainer.max_epochs
    if not isinstance(steps, int) or steps < -1 or steps == 0:
        raise ConfigurationError(
            f"trainer.max_steps={steps}: it is a count of optimizer steps, 1 or more, or -1 for no limit."
        )
    if steps == -1 and epochs is None and config.trainer.max_time is None:
        raise ConfigurationError(
            "trainer.max_steps=-1 without trainer.max_epochs or trainer.max_time would never end; give one of them."
        )
