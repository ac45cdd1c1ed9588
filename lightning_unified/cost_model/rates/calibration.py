"""What measured steps taught about a machine: its speeds, and how far predictions were off; kept between runs."""

import json
import logging
import os
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_unified.cost_model.rates import Alignment, Rates, measure_alignment, measure_rates

__all__ = [
    "CACHE_VARIABLE",
    "Calibration",
    "cache_directory",
    "calibrated_machines",
    "clear_calibrations",
    "kind_of",
    "machine_key",
]

log = logging.getLogger("lightning_unified")

CACHE_VARIABLE = "LIGHTNING_UNIFIED_CACHE"
"""Names the folder of what can be made anew, in place of the platform's own."""

_VERSION = 1
_KEPT = 16  # judgement: ratios kept of each kind
_MOST = 1.3  # judgement: a correction above this says that the prediction is wrong, not that the machine is a little different

Ratios = dict[str, list[float]]


def cache_directory(environ: Mapping[str, str] = os.environ, *, system: str = sys.platform) -> Path | None:
    """Return the folder of this user's calibrations, None where there is no home to have one in.

    `LIGHTNING_UNIFIED_CACHE` goes before the platform's own: `$XDG_CACHE_HOME` or `~/.cache`, on macOS `~/Library/Caches`, on
    Windows `%LOCALAPPDATA%`.

    Source:
        XDG Base Directory Specification 0.8: relative paths are to be ignored.
    """
    if environ.get(CACHE_VARIABLE):
        return Path(environ[CACHE_VARIABLE]) / "calibration"
    named = environ.get("LOCALAPPDATA" if system == "win32" else "XDG_CACHE_HOME", "")
    usual = {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(system, ".cache")
    if Path(named).is_absolute() and system != "darwin":
        return Path(named) / "lightning_unified" / "calibration"
    try:
        return Path.home() / usual / "lightning_unified" / "calibration"
    except RuntimeError:
        return None


def machine_key(*, device: str, total_bytes: int | None, torch_version: str) -> str:
    """Return the name under which a machine's figures are kept: another device, memory or torch is another machine.

    Args:
        device: Its name, as its driver writes it.
        total_bytes: Of its pool; None if unknown.
        torch_version: As `torch.__version__`.
    """
    size = "unknown" if total_bytes is None else f"{round(total_bytes / 2**30)}gib"
    return re.sub(r"[^a-z0-9.]+", "-", f"{device}-{size}-torch-{torch_version}".lower()).strip("-")


def kind_of(*, backend: str, precision: str, recomputes: bool) -> str:
    """Return the kind of a prediction: those that are right or wrong together.

    Args:
        backend: Of the trace: `"cuda"`, `"mps"`, ….
        precision: Lightning's name.
        recomputes: Whether anything runs again in the backward pass.
    """
    return f"{backend} {precision}{' recomputed' * recomputes}"


class Calibration:
    """The file of one machine. Reading or writing it never fails a run: a broken file is warned about once and taken for none.

    Args:
        machine: As `machine_key` gives it.
        directory: The folder of the files; None keeps nothing.

    Attributes:
        rates: Measured speeds; None before they are kept by `keep`.
        alignment: What aligned sizes gain; None before it is kept.
        peaks: Measured over predicted peaks by kind, the newest last.
        steps: Measured over predicted seconds a step by kind, the newest last.
    """

    def __init__(self, machine: str, *, directory: Path | None) -> None:
        self.machine = machine
        self.path = None if directory is None else directory / f"{machine}.json"
        self.rates: Rates | None = None
        self.alignment: Alignment | None = None
        self.peaks: Ratios = {}
        self.steps: Ratios = {}
        self._warned = False

    @classmethod
    def load(cls, machine: str, *, directory: Path | None = None) -> "Calibration":
        """Return what is kept of a machine, with nothing in it if there is no file that can be read.

        Args:
            machine: As `machine_key` gives it.
            directory: Default `cache_directory()`.
        """
        calibration = cls(machine, directory=directory or cache_directory())
        calibration._read()
        return calibration

    def keep(self, *, rates: Rates | None = None, alignment: Alignment | None = None) -> None:
        """Keep measured speeds, or what alignment gains; None leaves what there is."""
        self.rates, self.alignment = rates or self.rates, alignment or self.alignment
        self._write()

    def speeds(self, device: torch.device | str) -> Rates:
        """Return the measured speeds of this machine; the first time they are measured, with what alignment gains, and kept.

        Takes two to four seconds then, and some memory of the device: do it before a peak is read.

        Args:
            device: The machine's own, which is here.
        """
        rates = self.rates or measure_rates(device)
        if self.rates is None:
            self.keep(rates=rates)
        self.gains(device)
        return rates

    def gains(self, device: torch.device | str) -> Alignment:
        """Return what aligned sizes gain on this machine; measured the first time, in half a second, and kept.

        Args:
            device: As for `speeds`.
        """
        alignment = self.alignment or measure_alignment(device)
        if self.alignment is None:
            self.keep(alignment=alignment)
        return alignment

    def record(
        self,
        kind: str,
        *,
        predicted_bytes: int,
        measured_bytes: int,
        predicted_seconds: float | None = None,
        measured_seconds: float | None = None,
    ) -> None:
        """Note what a step really took beside what was predicted.

        Args:
            kind: As `kind_of` gives it.
            predicted_bytes: The peak as predicted, not corrected by `peak_factor`.
            measured_bytes: The same figure, measured.
            predicted_seconds: Of a step, not corrected by `step_factor`; None where time was not predicted.
            measured_seconds: Of a step, once warm; None where it was not measured.

        Raises:
            ValueError: If a figure is not positive.
        """
        given = (predicted_bytes, measured_bytes, predicted_seconds, measured_seconds)
        if any(figure is not None and not figure > 0 for figure in given):
            raise ValueError(
                f"predicted and measured figures must be positive, or None for seconds; these are {given}."
            )
        self._read()  # another process may have learnt something since
        _append(self.peaks, kind, measured_bytes / predicted_bytes)
        if predicted_seconds is not None and measured_seconds is not None:
            _append(self.steps, kind, measured_seconds / predicted_seconds)
        self._write()

    def peak_factor(self, kind: str) -> float:
        """Return by what a predicted peak of this kind is to be multiplied: the worst that was seen of late, from 1.0 to 1.3.

        It only ever raises: a prediction that was too high once may be right the next time, and too low costs a recovery.
        """
        return min(max([1.0, *self.peaks.get(kind, [])]), _MOST)

    def step_factor(self) -> float:
        """Return by what predicted seconds are to be multiplied: the median over all kinds, 1.0 if none was measured.

        One factor for a machine: a factor for each kind would favour the plans that have not been tried.
        """
        return statistics.median([ratio for ratios in self.steps.values() for ratio in ratios] or [1.0])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: what the file holds."""
        return {
            "version": _VERSION,
            "machine": self.machine,
            "rates": None if self.rates is None else self.rates.to_dict(),
            "alignment": None if self.alignment is None else self.alignment.to_dict(),
            "peaks": self.peaks,
            "steps": self.steps,
        }

    def _read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            state = json.loads(self.path.read_text())
            if state["version"] != _VERSION:
                return
            rates = None if state["rates"] is None else Rates(**state["rates"])
            alignment = None if state["alignment"] is None else Alignment.from_dict(state["alignment"])
            peaks, steps = _ratios(state["peaks"]), _ratios(state["steps"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if not self._warned:
                log.warning(
                    "The calibration %s cannot be read (%s: %s); it is not used. The next measured step writes it anew.",
                    self.path,
                    type(error).__name__,
                    error,
                )
            self._warned = True
            return
        self.rates, self.alignment, self.peaks, self.steps = rates, alignment, peaks, steps

    def _write(self) -> None:
        """Write the file, whole or not at all; a disk that refuses is warned about once."""
        if self.path is None:
            return
        new = self.path.with_suffix(f".{os.getpid()}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(self.to_dict(), indent=1))
            new.replace(self.path)
        except OSError as error:
            log.warning("The calibration is not saved in %s: %s", self.path, error)
            self.path = None


def calibrated_machines(directory: Path | None = None) -> list[str]:
    """Return the machines that something is kept of, sorted; `Calibration.load` reads each.

    Args:
        directory: Default `cache_directory()`.
    """
    directory = directory or cache_directory()
    return sorted(path.stem for path in directory.glob("*.json")) if directory is not None else []


def clear_calibrations(directory: Path | None = None) -> list[str]:
    """Delete what is kept of all machines and return which these were.

    Args:
        directory: Default `cache_directory()`.
    """
    machines = calibrated_machines(directory)
    for machine in machines:
        path = Calibration(machine, directory=directory or cache_directory()).path
        assert path is not None
        path.unlink(missing_ok=True)
    return machines


def _append(ratios: Ratios, kind: str, ratio: float) -> None:
    ratios[kind] = [*ratios.get(kind, []), ratio][-_KEPT:]


def _ratios(state: Mapping[str, Any]) -> Ratios:
    found = {str(kind): [float(ratio) for ratio in ratios][-_KEPT:] for kind, ratios in state.items()}
    if not all(0 < ratio < float("inf") for ratios in found.values() for ratio in ratios):
        raise ValueError("a ratio is not positive")
    return found
