"""A snapshot on the terminal: pressure and swap, the devices, and the runs with their memory."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lightning_unified.cli.watch.snapshot import Snapshot
from lightning_unified.hardware import DeviceUse, Figure
from lightning_unified.status import RunRecord
from lightning_unified.units import format_bytes

__all__ = ["show"]

_LEVEL_STYLE = {"normal": "green", "warn": "yellow", "critical": "bold red", "unknown": "dim"}


def show(snapshot: Snapshot) -> RenderableType:
    """Lay out `snapshot` for a terminal of 80 columns or more."""
    return Group(*_parts(snapshot))


def _parts(snapshot: Snapshot) -> Iterator[RenderableType]:
    local = datetime.fromisoformat(snapshot.time).astimezone()
    yield Text.assemble((snapshot.host or "this machine", "bold"), f"  {local:%Y-%m-%d %H:%M:%S}")
    yield _system(snapshot)
    yield Text()
    devices = [_device_row(device) for device in snapshot.devices]
    yield _table("Memory", ("device", "pool", "total", "used", "", "available", "busy", "name"), devices)
    yield from (Text(line, style="dim") for line in _unknown(snapshot.devices))
    yield Text()
    if not snapshot.runs:
        yield Text.assemble(("Runs", "bold"), '  none: no run with strategy="unified" of this user is on this machine')
        return
    rows = [_progress_row(run, now=snapshot.time) for run in snapshot.runs]
    yield _table("Runs", ("pid", "module", "device", "step", "batch", "micro-batch", "updated", "directory"), rows)
    yield Text()
    rows = [_memory_row(run) for run in snapshot.runs]
    yield _table("Their memory", ("pid", "allocated", "reserved", "peak", "budget", "", "recoveries"), rows)


def _system(snapshot: Snapshot) -> Table:
    pressure, grid = snapshot.pressure, Table.grid(padding=(0, 2, 0, 0))
    reasons = "; ".join(pressure.reasons)
    verdict = Text.assemble((pressure.level, _LEVEL_STYLE[pressure.level]), f": {reasons}" if reasons else "")
    grid.add_row("[bold]pressure[/]", verdict)
    grid.add_row("[bold]swap[/]", Text(_swap(snapshot)))
    return grid


def _swap(snapshot: Snapshot) -> str:
    used, total, rate = snapshot.swap_used.bytes, snapshot.swap_total.bytes, snapshot.pressure.swap_out_bytes_per_s
    if total == 0:
        return "none"
    amount = "unknown" if used is None else f"{format_bytes(used)} of {format_bytes(total)} used"
    return amount if rate is None else f"{amount}, {format_bytes(int(rate))} a second written"


def _device_row(device: DeviceUse) -> tuple[str, ...]:
    return (
        device.device,
        device.pool or "unknown",
        *(format_bytes(figure.bytes) for figure in (device.total, device.used)),
        _share(device.used.bytes, device.total.bytes),
        format_bytes(device.available.bytes),
        "" if device.busy is None else f"{device.busy:.0%}",
        device.name,
    )


def _unknown(devices: Sequence[DeviceUse]) -> Iterator[str]:
    """Yield the reasons of unknown figures, each once per device."""
    for device in devices:
        figures: list[Figure] = [device.total, device.used, device.available]
        for reason in dict.fromkeys(figure.source for figure in figures if figure.bytes is None):
            yield f"{device.device}: {reason}"


def _progress_row(run: RunRecord, *, now: str) -> tuple[str, ...]:
    figures = run.figures
    age = datetime.fromisoformat(now) - datetime.fromisoformat(run.updated)
    return (
        str(run.pid),
        figures.module,
        figures.device,
        f"{figures.step:,}",
        _count(figures.effective_batch_size),
        _count(figures.micro_batch_size),
        _ago(age.total_seconds()),
        _near(figures.directory),
    )


def _memory_row(run: RunRecord) -> tuple[str, ...]:
    figures = run.figures
    amounts = (figures.allocated_bytes, figures.reserved_bytes, figures.peak_bytes, figures.budget_bytes)
    share = _share(figures.peak_bytes, figures.budget_bytes)
    return (
        str(run.pid),
        *(format_bytes(amount) for amount in amounts),
        f"peak is {share} of it" if share else "",
        str(figures.recoveries),
    )


def _share(part: int | None, whole: int | None) -> str:
    return "" if part is None or not whole else f"{part / whole:.0%}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _near(directory: str | None) -> str:
    """Return a folder relative to the working directory or the home, if inside."""
    if directory is None:
        return "unknown"
    for folder, name in ((Path.cwd(), ""), (Path.home(), "~")):
        if Path(directory).is_relative_to(folder):
            return str(Path(name) / Path(directory).relative_to(folder))
    return directory


def _ago(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole} s ago" if whole < 120 else f"{whole // 60} min ago"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return rows under headings: only the last column folds, numbers are right-aligned."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for at, column in enumerate(columns):
        last = at == len(columns) - 1
        numbers = all(row[at][:1].isdigit() or row[at] in ("", "unknown") for row in rows)
        table.add_column(column, overflow="fold", no_wrap=not last, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
