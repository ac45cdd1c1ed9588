"""A snapshot on the terminal, in lines that fit any width: pressure and swap, devices, runs."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from rich.text import Text

from lightning_unified.cli.watch.runs import grouped
from lightning_unified.cli.watch.snapshot import Snapshot
from lightning_unified.files.status import RunRecord
from lightning_unified.hardware import DeviceUse, Figure
from lightning_unified.terminal import listed, short_path, wrapped
from lightning_unified.units import format_bytes, format_duration

__all__ = ["show"]

_LEVEL_STYLE = {"normal": "green", "warn": "yellow", "critical": "bold red", "unknown": "dim"}
_NARROWEST = 40


def show(snapshot: Snapshot, *, width: int) -> Text:
    """Lay out `snapshot` for a terminal of `width` columns."""
    return Text("\n").join(_lines(snapshot, max(width, _NARROWEST)))


def _lines(snapshot: Snapshot, width: int) -> Iterator[Text]:
    local = datetime.fromisoformat(snapshot.time).astimezone()
    time = f"{local:%Y-%m-%d %H:%M:%S}"
    host = short_path(snapshot.host or "this machine", width - len(time) - 2)
    yield Text.assemble((host, "bold"), f"  {time}")
    pressure = snapshot.pressure
    reasons = "; ".join(pressure.reasons)
    facts = {"pressure": f"{pressure.level}{f': {reasons}' if reasons else ''}", "swap": _swap(snapshot)}
    for line in _named(facts.items(), width):
        line.highlight_regex(rf"(?<=pressure  ){pressure.level}", _LEVEL_STYLE[pressure.level])
        yield line
    yield from (Text(), Text("Memory", style="bold"))
    yield from _named([(device.device, _device(device)) for device in snapshot.devices], width)
    for reason in _unknown(snapshot.devices):
        yield from (Text(line, style="dim") for line in wrapped(reason, width, indent=2))
    yield from (Text(), Text("Runs", style="bold"))
    if not snapshot.runs:
        none = 'none: no run with strategy="unified" of this user is on this machine'
        yield from map(Text, wrapped(none, width))
    for ranks in grouped(snapshot.runs):
        yield from _run(ranks, now=snapshot.time, width=width)


def _named(facts: Iterable[tuple[str, str]], width: int) -> Iterator[Text]:
    """Yield a line for each named fact; long ones are wrapped at words."""
    facts = list(facts)
    column = max((len(name) for name, _ in facts), default=0) + 2
    for name, text in facts:
        first, *rest = wrapped(text, width - column)
        yield Text.assemble((name.ljust(column), "bold"), first)
        yield from (Text(" " * column + line) for line in rest)


def _swap(snapshot: Snapshot) -> str:
    used, total, rate = snapshot.swap_used.bytes, snapshot.swap_total.bytes, snapshot.pressure.swap_out_bytes_per_s
    if total == 0:
        return "none"
    amount = "unknown" if used is None else f"{format_bytes(used)} of {format_bytes(total)} used"
    return amount if rate is None else f"{amount}, {format_bytes(int(rate))} a second written"


def _device(device: DeviceUse) -> str:
    share = _share(device.used.bytes, device.total.bytes)
    parts = [
        f"{format_bytes(device.used.bytes)} of {format_bytes(device.total.bytes)} used{f' ({share})' if share else ''}",
        f"{format_bytes(device.available.bytes)} available",
        "" if device.busy is None else f"busy {device.busy:.0%}",
        f"{device.pool or 'unknown'} pool",
        device.name,
    ]
    return listed(parts)


def _unknown(devices: Sequence[DeviceUse]) -> Iterator[str]:
    """Yield the reasons of unknown figures, each once per device."""
    for device in devices:
        figures: list[Figure] = [device.total, device.used, device.available]
        for reason in dict.fromkeys(figure.source for figure in figures if figure.bytes is None):
            yield f"{device.device}: {reason}"


def _run(ranks: Sequence[RunRecord], *, now: str, width: int) -> Iterator[Text]:
    """Yield a run's name, directory, progress, batch and memory, each in lines of their own.

    Of several ranks, the first one here stands for the run, and each has a line with its memory.
    """
    run, figures = ranks[0], ranks[0].figures
    age = (datetime.fromisoformat(now) - datetime.fromisoformat(run.updated)).total_seconds()
    pid, name = str(run.pid), f"{figures.module} on {figures.device}"
    first, *rest = wrapped(f"{pid}  {name}, updated {format_duration(max(0, int(age)))} ago", width, indent=2)
    yield Text.assemble((first[: len(pid)], "bold"), first[len(pid) :])
    yield from map(Text, rest)
    yield Text("  " + short_path(_near(figures.directory), width - 2))
    each = [_memory(run)] if figures.ranks == 1 else [_rank(one) for one in ranks]
    for line in (_progress(run), _batch(run), *each):
        yield from (Text("  " + part) for part in wrapped(line, width - 2, indent=2))


def _rank(run: RunRecord) -> str:
    """Return the line of one rank."""
    figures = run.figures
    name = f"rank {figures.rank} of {figures.ranks}: {figures.device}, process {run.pid}"
    return listed([name, f"micro-batch {_count(figures.micro_batch_size)}", _memory(run)])


def _progress(run: RunRecord) -> str:
    figures, loss = run.figures, run.figures.loss
    ends = f" of {figures.total_steps:,} ({_share(figures.step, figures.total_steps)})" if figures.total_steps else ""
    parts = [
        f"step {figures.step:,}{ends}",
        f"loss {'– (none is logged)' if loss is None else loss if isinstance(loss, str) else format(loss, '.4g')}",
        "" if run.seconds_per_step is None else f"{format_duration(run.seconds_per_step)}/step",
        "" if run.seconds_left is None else f"{format_duration(round(run.seconds_left))} left",
    ]
    return listed(parts)


def _batch(run: RunRecord) -> str:
    figures = run.figures
    sizes = f"batch {_count(figures.effective_batch_size)}", f"micro-batch {_count(figures.micro_batch_size)}"
    if figures.ranks > 1:  # each rank has a line of its own
        sizes = sizes[0], f"{figures.ranks} ranks"
    return listed([*sizes, f"{figures.recoveries} {'recovery' if figures.recoveries == 1 else 'recoveries'}"])


def _memory(run: RunRecord) -> str:
    figures = run.figures
    share = _share(figures.peak_bytes, figures.budget_bytes)
    parts = [
        f"allocated {format_bytes(figures.allocated_bytes)}",
        f"reserved {format_bytes(figures.reserved_bytes)}",
        f"peak {format_bytes(figures.peak_bytes)}{f' ({share} of the budget)' if share else ''}",
        f"budget {format_bytes(figures.budget_bytes)}",
    ]
    return listed(parts)


def _share(part: int | None, whole: int | None) -> str:
    return "" if part is None or not whole else f"{part / whole:.0%}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _near(directory: str | None) -> str:
    """Return a folder relative to the working directory or the home, if inside."""
    if directory is None:
        return "unknown directory"
    for folder, name in ((Path.cwd(), ""), (Path.home(), "~")):
        if Path(directory).is_relative_to(folder):
            return str(Path(name) / Path(directory).relative_to(folder))
    return directory
