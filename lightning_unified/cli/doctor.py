"""`doctor`: show this machine's memory, capabilities, environment and suitable tiers."""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware import (
    Capability,
    Finding,
    HardwareSettings,
    Reading,
    Sources,
    capabilities,
    describe,
    detect,
    lint_environment,
    mps_allocator_initialized,
    parse_spec,
    read,
    resolve_budget,
)
from lightning_unified.hardware.environment.builds import build_findings
from lightning_unified.hardware.loader_workers import BatchWork, LoaderWorkers
from lightning_unified.hardware.simulated import PROFILES, SimulatedMachine
from lightning_unified.hardware.sources import core_count, shipped_configuration
from lightning_unified.units import format_bytes

__all__ = ["Diagnosis", "Tier", "diagnose", "main", "read_tiers"]

_VERDICT_STYLE = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}
_DEFAULT = re.compile(r"\$\{oc\.select:[\w.]+,\s*(\d+)\}")  # a number that another key may replace
_DATA: Mapping[BatchWork, str] = MappingProxyType(
    {"gather": "texts (all data here but wordle)", "compute": "wordle", "unknown": "a data module of your own"}
)
_FIGURES = ("total", "available", "allocated", "reserved", "peak", "host")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One memory tier on this machine.

    Attributes:
        spec: The budget as the tier's file writes it.
        bytes: The budget in bytes on this machine, None if unknown.
        fits: Whether the pool has the budget as written; a smaller pool gives a tier less.
        fits_now: Whether the budget is within the bytes that `auto` would take now.
        batch_size: The effective batch, None where the tier sets none.
        micro_batch_size: The size as the tier's file writes it, None where it follows another choice.
        reason: The source of the bytes, or the reason why the budget is refused.
    """

    spec: str
    bytes: int | None
    fits: bool
    fits_now: bool
    batch_size: int | None
    micro_batch_size: int | str | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The output of doctor; the JSON omits `settings`, `workers` and `machine`."""

    machine: str
    reading: Reading
    tiers: dict[str, Tier]
    tier: str | None
    capabilities: list[Capability]
    environment: list[Finding]
    hardware: str
    settings: HardwareSettings
    workers: dict[str, LoaderWorkers]

    def as_json(self) -> dict[str, Any]:
        """Return the seven keys that scripts rely on."""
        return {
            "reading": asdict(self.reading),
            "pool": self.reading.pool,
            "budgets": {name: asdict(tier) for name, tier in self.tiers.items()},
            "tier": self.tier,
            "capabilities": [asdict(entry) for entry in self.capabilities],
            "environment": [asdict(finding) for finding in self.environment],
            "hardware": self.hardware,
        }


def main(argv: list[str]) -> int:
    """Print the diagnosis of this machine; return 0, or 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="python -m lightning_unified doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON for scripts, and nothing else")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:<index>, mps or xpu")
    parser.add_argument("--simulate", metavar="MACHINE", help=f"diagnose a simulated machine: {', '.join(PROFILES)}")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as done:
        return int(done.code or 0)
    try:
        machine = None if arguments.simulate is None else SimulatedMachine(arguments.simulate, environ=os.environ)
        diagnosis = diagnose(arguments.device, sources=None if machine is None else machine.sources)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if arguments.json:
        sys.stdout.write(json.dumps(diagnosis.as_json(), indent=2) + "\n")
    else:
        _print(diagnosis, Console())
    return 0


def diagnose(device: str = "auto", *, sources: Sources | None = None, conf: Path | None = None) -> Diagnosis:
    """Return the diagnosis of a machine; a figure that cannot be read stays unknown.

    Args:
        device: The device to diagnose.
        sources: The files, environment and torch to read; default this machine's.
        conf: The folder of the configuration groups; default the one shipped with the package.

    Raises:
        HardwareError: If `device` is not present.
    """
    sources = sources or Sources.live()
    # Check the environment before the first reading, which on MPS sets missing variables.
    findings = build_findings(sources) + lint_environment(
        sources.environ,
        allocator_initialized=mps_allocator_initialized(sources),
        cores=core_count(sources),
        num_threads=_torch_threads(sources),
    )
    reading = read(device, sources=sources)
    known = capabilities(reading, sources=sources)
    trains = read("auto", sources=sources)
    tiers = _tiers(read_tiers(conf), reading)
    return Diagnosis(
        machine=describe(sources),
        reading=reading,
        tiers=tiers,
        tier=_best(tiers),
        capabilities=known,
        environment=findings,
        hardware=detect(sources),
        settings=HardwareSettings().resolve(trains, capabilities(trains, sources=sources), sources=sources),
        workers={data: HardwareSettings().workers(trains, sources=sources, work=work) for work, data in _DATA.items()},
    )


def read_tiers(conf: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the contents of `conf/memory` by tier, interpolations unresolved.

    The result is empty if there are no files.
    """
    folder = (conf or shipped_configuration()) / "memory"
    tiers = {}
    for path in sorted(folder.glob("*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if isinstance(content, dict):
            tiers[path.stem] = content
    return tiers


def _tiers(files: dict[str, dict[str, Any]], reading: Reading) -> dict[str, Tier]:
    try:
        now = resolve_budget("auto", reading).bytes
    except ConfigurationError:
        now = None
    tiers = {}
    for name, content in files.items():
        memory, data = content.get("memory") or {}, content.get("data") or {}
        spec = memory.get("budget", "auto")
        try:
            budget = resolve_budget(spec, reading)
            count, reason = budget.bytes, budget.reason
            fits = _asked(spec) in (None, count)
        except ConfigurationError as error:
            count, reason, fits = _asked(spec), str(error), False
        tiers[name] = Tier(
            spec=str(spec),
            bytes=count,
            fits=fits,
            fits_now=fits and count is not None and now is not None and count <= now,
            batch_size=_plain(data.get("batch_size")),
            micro_batch_size=_plain(memory.get("micro_batch_size")),
            reason=reason,
        )
    return dict(sorted(tiers.items(), key=lambda item: (item[1].spec == "auto", _asked(item[1].spec) or 0)))


def _asked(spec: str | int) -> int | None:
    """Return the bytes of a budget that is an amount, None for a share or `auto`."""
    try:
        parsed = parse_spec(spec)
    except ConfigurationError:
        return None
    return int(parsed.amount) if parsed.kind in ("bytes", "up to") else None


def _plain(value: Any) -> Any:
    if isinstance(value, str) and (default := _DEFAULT.fullmatch(value)):
        return int(default[1])
    return None if isinstance(value, str) and "${" in value else value


def _best(tiers: dict[str, Tier]) -> str | None:
    """Return the largest fixed tier that fits now; else `"auto"` if it fits; else None."""
    fixed = {name: tier.bytes or 0 for name, tier in tiers.items() if tier.fits_now and tier.spec != "auto"}
    if fixed:
        return max(fixed, key=lambda name: fixed[name])
    return next((name for name, tier in tiers.items() if tier.fits_now), None)


def _torch_threads(sources: Sources) -> int | None:
    ask = getattr(sources.torch, "get_num_threads", None)
    return None if ask is None else int(ask())


def _print(diagnosis: Diagnosis, console: Console) -> None:
    reading = diagnosis.reading
    console.print(f"[bold]This machine has[/] {escape(diagnosis.machine)}")
    console.print(f"[bold]Pool[/] {reading.pool}, of {reading.device} ({escape(reading.name)})")
    figures = [(name, format_bytes(f.bytes), f.source) for name in _FIGURES for f in [getattr(reading, name)]]
    _table(console, "Memory", ("figure", "amount", "source"), figures)
    tiers = [
        (name, format_bytes(tier.bytes), _fit(tier), _cell(tier.batch_size), _cell(tier.micro_batch_size), tier.reason)
        for name, tier in diagnosis.tiers.items()
    ]
    _table(console, "Tiers", ("memory=", "budget", "fits", "batch", "micro", "why"), tiers)
    _table(
        console,
        "Capabilities",
        ("name", "value", "why"),
        [(c.name, str(c.value), c.reason) for c in diagnosis.capabilities],
    )
    findings = [
        (f"{f.variable}={f.value}", f"[{_VERDICT_STYLE[f.verdict]}]{f.verdict}[/]", f.advice)
        for f in diagnosis.environment
    ]
    if findings:
        _table(console, "Environment", ("variable", "verdict", "advice"), findings, plain=(0, 2))
    else:
        console.print("[bold]Environment[/] no findings")
    console.print(f"[bold]memory={diagnosis.tier or 'none'}[/] is the largest tier that fits now")
    console.print(
        f"[bold]hardware=auto[/] would choose hardware={diagnosis.hardware}: {escape(_settings(diagnosis.settings))}"
    )
    for data, workers in diagnosis.workers.items():
        console.print(
            f"[bold]hardware.num_workers=auto[/] is {workers.count} for {escape(data)}: {escape(workers.reason)}"
        )


def _fit(tier: Tier) -> str:
    return "yes" if tier.fits_now else "not now" if tier.fits else "no"


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _settings(settings: HardwareSettings) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(settings).items() if name != "name")


def _table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    plain: Sequence[int] | None = None,
) -> None:
    """Print a table; columns in `plain` (default all) are escaped, the others hold Rich markup."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) if plain is None or at in plain else cell for at, cell in enumerate(row)))
    console.print(table)
    console.print()
