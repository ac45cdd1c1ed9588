"""Prepare the machine: check hardware, set environment and threads."""

import math
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_unified.cli.config.binding import make, target_of
from lightning_unified.errors import ConfigurationError, HardwareError
from lightning_unified.hardware import (
    HardwareSettings,
    Reading,
    Sources,
    capabilities,
    describe,
    prepare_allocators,
    read,
    require,
    resolve_budget,
)
from lightning_unified.hardware.loader_workers import BatchWork, LoaderWorkers
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.precision import full_name

__all__ = ["Machine", "check_settings", "hardware_settings", "open_machine", "prepare", "rows_of", "sources_of"]

# With a simulated machine these settings are resolved for this machine's cores, the others for the simulated device.
_DONE_HERE = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "start_method", "host_threads")

# Numbers that Lightning accepts and then fails on, or trains differently with.
_TRAINER_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = MappingProxyType(
    {
        "accumulate_grad_batches": (lambda count: count >= 1, "a count of batches, 1 or more"),
        "gradient_clip_val": (lambda most: 0 <= most < math.inf, "a norm, 0 (no clipping) or more, or null"),
        "val_check_interval": (
            lambda each: each > 0,
            "a count of batches, 1 or more, or a share of an epoch, up to 1.0",
        ),
        "log_every_n_steps": (lambda each: each >= 0, "a count of steps, 0 (never) or more"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine of a run, resolved; the strategy resolves the budget, on its own device.

    Args:
        reading: The pool before anything was allocated.
        settings: The hardware settings, all `auto` values resolved.
        workers: The loader processes, with the reason.
    """

    reading: Reading
    settings: HardwareSettings
    workers: LoaderWorkers


def sources_of(simulate: str | None) -> Sources:
    """Return the sources of this machine, or of the simulated machine that `simulate` names.

    Raises:
        HardwareError: If there is no machine of that name.
    """
    return Sources.live() if simulate is None else SimulatedMachine(simulate, environ=os.environ).sources


def open_machine(config: DictConfig) -> Sources:
    """Return the sources of the machine of `config`, with the allocators' settings written.

    Call it before anything reads the device: a reading creates the accelerator's allocator, which then reads its settings.

    Raises:
        BudgetError: If the budget cannot be read.
        HardwareError: If there is no simulated machine of that name.
    """
    sources = sources_of(config.simulate)
    prepare_allocators(config.memory.budget, sources=sources)
    return sources


def prepare(config: DictConfig, sources: Sources) -> Machine:
    """Check the machine for `config`, and write the resolved hardware settings into it.

    Args:
        config: The configuration, `hardware=auto` replaced by the hardware that was found.
        sources: The machine's sources, from `open_machine`.

    Raises:
        HardwareError: If the requested hardware is absent, or contradicts the simulated machine.
        BudgetError: If the budget exceeds the pool.
    """
    given = hardware_settings(config)
    if config.simulate is not None:
        _check_simulation(config, given, SimulatedMachine(config.simulate))
    require(given.name, sources)
    on_cpu = given.accelerator == "cpu" and config.simulate is None
    reading = read("cpu" if on_cpu else "auto", sources=sources)
    resolve_budget(config.memory.budget, reading)  # refuse an impossible budget before the model is built
    work, rows_bytes = rows_of(config)
    settings = given.resolve(
        reading, capabilities(reading, sources=sources), sources=sources, work=work, rows_bytes=rows_bytes
    )
    workers = given.workers(reading, sources=sources, work=work, rows_bytes=rows_bytes)
    if config.simulate is not None:
        cpu = read("cpu")
        here = given.resolve(cpu, capabilities(cpu), work=work, rows_bytes=rows_bytes)
        workers = given.workers(cpu, work=work, rows_bytes=rows_bytes)
        settings = replace(settings, accelerator="cpu", **{name: getattr(here, name) for name in _DONE_HERE})
    with open_dict(config):
        config.hardware.update({field.name: getattr(settings, field.name) for field in fields(settings)})
    _set_threads(int(settings.host_threads), os.environ)
    return Machine(reading=reading, settings=settings, workers=workers)


def rows_of(config: DictConfig) -> tuple[BatchWork, int]:
    """Return the work of a batch of the configured data, and the bytes of its rows.

    The work is the attribute `batch_work` of the data module. The bytes are estimated from the size of the file; 0 if it is not known.
    """
    path = config.data.get("path")
    size = Path(path).stat().st_size if isinstance(path, str) and Path(path).is_file() else 0
    work = getattr(target_of(str(config.data["_target_"])), "batch_work", "unknown")
    return work if work in ("gather", "compute") else "unknown", size


def hardware_settings(config: DictConfig) -> HardwareSettings:
    """Return the hardware settings as written, with the full name of the precision."""
    given: HardwareSettings = make("hardware", config.hardware)
    return replace(given, precision=full_name(given.precision))


def _check_simulation(config: DictConfig, given: HardwareSettings, machine: SimulatedMachine) -> None:
    """Refuse hardware, compilation and strategies that a simulated machine does not support."""
    profile = machine.profile
    if given.name not in {"auto", profile.hardware, profile.backend}:
        raise HardwareError(
            f"hardware={given.name} contradicts simulate={profile.name}, which has: {describe(machine.sources)}; use "
            f"hardware={profile.hardware} or hardware=auto, or simulate another machine."
        )
    if config.memory.get("compile") in ("blocks", "whole"):
        raise ConfigurationError(
            f"memory.compile={config.memory.compile} with simulate={profile.name}: compiled code takes memory where it cannot be counted; use "
            "memory.compile=false."
        )
    strategy = config.trainer.strategy
    if OmegaConf.is_dict(strategy) and strategy.get("simulate") == config.simulate:
        return
    raise ConfigurationError(
        f"trainer.strategy={strategy if isinstance(strategy, str) else 'another'} with simulate={profile.name}: only the unified strategy "
        "runs on a simulated machine; leave trainer.strategy or simulate out."
    )


def _set_threads(count: int, environ: MutableMapping[str, str]) -> None:
    """Use `count` threads here and in child processes, unless the user set `OMP_NUM_THREADS`."""
    torch.set_num_threads(int(environ.setdefault("OMP_NUM_THREADS", str(count))))


def check_settings(config: DictConfig) -> None:
    """Refuse invalid counts and contradicting settings before anything slow starts.

    Raises:
        ConfigurationError: With the key, its value and the allowed values.
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
    for name, (is_allowed, allowed) in _TRAINER_NUMBERS.items():
        number = config.trainer.get(name)
        if isinstance(number, (int, float)) and not is_allowed(number):
            raise ConfigurationError(f"trainer.{name}={number}: it is {allowed}.")
    _check_precision(config)


def _check_precision(config: DictConfig) -> None:
    """Refuse two different precisions.

    Lightning cannot distinguish `32-true` from no precision.
    """
    if not OmegaConf.is_dict(config.trainer.strategy):
        return  # Lightning's own strategies use the Trainer's precision
    said, asked = config.trainer.precision, config.memory.precision
    if said is not None and asked != "trainer" and full_name(said) != full_name(asked):
        raise ConfigurationError(
            f"trainer.precision={said} beside hardware.precision={asked}: the second one decides. Give "
            f"hardware.precision={full_name(said)} alone."
        )
