"""The machine of a plan: this one, a simulated one, or a stand-in for hardware that is not present."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from omegaconf import DictConfig, open_dict

from lightning_unified.cli.config.composition import composed
from lightning_unified.cli.config.resume import merged_overrides
from lightning_unified.cli.run.machine import hardware_settings, rows_of, sources_of
from lightning_unified.errors import HardwareError
from lightning_unified.hardware import (
    Budget,
    Reading,
    Sources,
    Watermarks,
    capabilities,
    describe,
    detect,
    parse_spec,
    read,
    require,
    resolve_budget,
    watermarks,
)
from lightning_unified.hardware.loader_workers import LoaderWorkers
from lightning_unified.hardware.simulated import PROFILES
from lightning_unified.hardware.simulated.profiles import Profile
from lightning_unified.precision import PrecisionChoice, choose_precision, platform_of

__all__ = ["Target", "configured_for", "target_of"]

# A plan starts no loader processes.
_NO_WORKERS = {
    "num_workers": 0,
    "persistent_workers": False,
    "prefetch_factor": None,
    "pin_memory": False,
    "start_method": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The machine that is planned for.

    Attributes:
        name: The simulated machine's name, as `simulate=` takes it; None for this machine.
        description: The machine in one line.
        reading: Its pool.
        budget: Bytes that the run may use.
        marks: The watermarks: where the allocator is capped, and where caches are cleared.
        precision: The precision that runs on it.
        workers: The loader processes of a run there, with the reason; a plan starts none.
    """

    name: str | None
    description: str
    reading: Reading
    budget: Budget
    marks: Watermarks
    precision: PrecisionChoice
    workers: LoaderWorkers

    @property
    def backend(self) -> str:
        """`"cpu"`, `"cuda"`, `"rocm"` or `"mps"`."""
        return self.reading.backend


def configured_for(config: DictConfig, overrides: Sequence[str]) -> tuple[DictConfig, str | None]:
    """Return the configuration for the target machine, and the machine's name if it is simulated.

    `hardware=auto` becomes the detected hardware, as in a run. The stand-in for hardware that is not present is the smallest
    simulated machine of its kind with that budget. Call it inside `searching`.

    Raises:
        HardwareError: If the hardware is not present and the budget is no amount, or the hardware contradicts `simulate`.
    """
    simulate, hardware = config.simulate, str(config.hardware.name)
    sources = sources_of(simulate)
    if hardware == "auto":
        return composed(merged_overrides(list(overrides), [f"hardware={detect(sources)}"])).config, simulate
    try:
        require(hardware, sources)
    except HardwareError:
        if simulate is not None:
            raise
        return config, _stand_in(hardware, config.memory.budget).name
    return config, simulate


def target_of(config: DictConfig, machine: str | None) -> Target:
    """Read the target machine, and write its resolved hardware settings into `config`.

    Raises:
        BudgetError: If the budget exceeds its pool.
        PrecisionError: If the machine does not support the precision.
    """
    given = hardware_settings(config)
    sources = sources_of(machine)
    reading = read("cpu" if given.accelerator == "cpu" else "auto", sources=sources)
    settings = given.resolve(reading, capabilities(reading, sources=sources), sources=sources)
    settings = replace(settings, **_NO_WORKERS)
    work, rows_bytes = rows_of(config)
    with open_dict(config):
        config.hardware.update({field.name: getattr(settings, field.name) for field in fields(settings)})
    budget = resolve_budget(config.memory.budget, reading)
    here = torch.device(reading.device)
    return Target(
        name=machine,
        description=_described(config, machine, sources),
        reading=reading,
        budget=budget,
        marks=watermarks(budget, reading, sources.environ),
        precision=choose_precision(config.memory.precision, platform=platform_of(here, sources=sources)),
        workers=given.workers(reading, sources=sources, work=work, rows_bytes=rows_bytes),
    )


def _described(config: DictConfig, machine: str | None, sources: Sources) -> str:
    if machine is None:
        return describe(sources)
    words = f"{machine} (simulated): {describe(sources)}"
    if config.simulate == machine:
        return words
    return f"{words}; it stands in for {config.hardware.name}, which is not here; simulate=… names another"


def _stand_in(hardware: str, spec: str | int) -> Profile:
    """Return the smallest simulated machine of that hardware that has the budget, else the largest."""
    parsed = parse_spec(spec)
    backend = {"jetson": "cuda", "dgx_spark": "cuda", "strix_halo": "rocm"}.get(hardware, hardware)
    kin = [each for each in PROFILES.values() if each.hardware == hardware]
    kin = kin or [each for each in PROFILES.values() if each.backend == backend]
    if parsed.kind not in ("bytes", "up to"):
        raise HardwareError(
            f"hardware={hardware} is not here, and memory.budget={spec} depends on the machine. Name one with simulate="
            f"{', '.join(each.name for each in kin)}; give an amount, as in memory.budget=16GiB; or see all with --fits-where."
        )
    by_size = sorted(kin, key=lambda each: each.total)
    return next((each for each in by_size if each.total >= parsed.amount), by_size[-1])
