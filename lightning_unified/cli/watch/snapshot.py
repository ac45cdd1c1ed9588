"""A snapshot of the machine: devices, pressure, swap and runs, as a record and as JSON."""

import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_unified.cli.watch.runs import running
from lightning_unified.files.status import RunRecord
from lightning_unified.hardware import DeviceUse, Figure, GpuReader, Pressure, PressureReader, Sources, read
from lightning_unified.hardware.host.memory import host_swap

__all__ = ["Observer", "Snapshot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of the machine at one time. Figures are bytes with a source; unknown is None.

    Attributes:
        time: The time, ISO 8601 in UTC.
        host: The machine's name in its network.
        pressure: The operating system's verdict, with reasons.
        swap_total: Size of the swap; macOS extends it as needed.
        swap_used: Swap in use.
        devices: The host first, then each GPU whose driver answers.
        runs: This user's runs of this package on this machine.
    """

    time: str
    host: str
    pressure: Pressure
    swap_total: Figure
    swap_used: Figure
    devices: list[DeviceUse]
    runs: list[RunRecord]

    def as_json(self) -> dict[str, Any]:
        """Return the six keys that scripts rely on."""
        return {
            "time": self.time,
            "host": self.host,
            "pressure": asdict(self.pressure),
            "swap": {"total": asdict(self.swap_total), "used": asdict(self.swap_used)},
            "devices": [asdict(device) for device in self.devices],
            "runs": [run.as_json() for run in self.runs],
        }


class Observer:
    """Takes snapshots; rates refer to the time since the previous one.

    Args:
        sources: The files and commands to read; its torch may be None and is not used.
        directory: The folder of the runs' files, None if there is none.
    """

    def __init__(self, sources: Sources, *, directory: Path | None) -> None:
        self._sources, self._directory = sources, directory
        self._pressure, self._gpus = PressureReader(sources), GpuReader(sources)

    def look(self, now: float) -> Snapshot:
        """Take a snapshot at `now`, in seconds of a monotonic clock."""
        total, used = host_swap(self._sources)
        return Snapshot(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            host=platform.node(),
            pressure=self._pressure.read(now),
            swap_total=total,
            swap_used=used,
            devices=[self._host(), *self._gpus.read()],
            runs=running(self._directory, self._sources),
        )

    def _host(self) -> DeviceUse:
        reading = read("cpu", sources=self._sources)
        total, available = reading.total, reading.available
        used = Figure(None, total.source if total.bytes is None else available.source)
        if total.bytes is not None and available.bytes is not None:
            used = Figure(max(0, total.bytes - available.bytes), f"{total.source} - {available.source}")
        return DeviceUse(
            device="host",
            name=reading.name,
            pool=reading.pool,
            total=total,
            used=used,
            available=available,
            busy=None,
            busy_source="unknown: not read for the host",
        )
