"""Calibration of a machine: its measured speeds and prediction errors, kept between runs.

Tabled and modelled figures miss a machine by some percent. Each measured step yields the ratio of its measured to its
predicted peak. A JSON file for each machine keeps the last 16 ratios of each kind.

Predicted peaks are multiplied by the worst recent ratio of their kind, between 1.0 and 1.3. A prediction that is too low costs
a recovery, one that is too high only a smaller micro-batch. A ratio above 1.3 means that the prediction is wrong, not that the
machine differs a little.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_unified.cost_model.rates import Alignment, Rates, measure_alignment, measure_rates
from lightning_unified.files.folders import cache_folder
from lightning_unified.hardware import Reading

__all__ = [
    "Calibration",
    "cache_directory",
    "calibrated_machines",
    "clear_calibrations",
    "kind_of",
    "machine_key",
]

log = logging.getLogger("lightning_unified")

_VERSION = 1
_KEPT = 16  # judgement: number of ratios kept for each kind
_MOST = 1.3  # judgement: a larger correction means a wrong prediction, not a slightly different machine

Ratios = dict[str, list[float]]


def cache_directory(environ: Mapping[str, str] = os.environ, *, system: str = sys.platform) -> Path | None:
    """Return the folder of this user's calibrations; None if the user has no home folder."""
    folder = cache_folder(environ, system=system)
    return None if folder is None else folder / "calibration"


def machine_key(*, device: str, total_bytes: int | None, torch_version: str) -> str:
    """Return the file name of a machine.

    Another device, memory size or torch version is another machine.

    Args:
        device: Device name as its driver reports it.
        total_bytes: Size of its pool; None if unknown.
        torch_version: As `torch.__version__`.

    Example:
        >>> machine_key(device="NVIDIA H200", total_bytes=150 * 2**30, torch_version="2.11.0")
        'nvidia-h200-150gib-torch-2.11.0'
    """
    size = "unknown" if total_bytes is None else f"{round(total_bytes / 2**30)}gib"
    return re.sub(r"[^a-z0-9.]+", "-", f"{device}-{size}-torch-{torch_version}".lower()).strip("-")


def kind_of(*, backend: str, precision: str, recomputes: bool) -> str:
    """Return the kind of a prediction; predictions of one kind share their errors."""
    return f"{backend} {precision}{' recomputed' * recomputes}"


class Calibration:
    """The calibration file of one machine.

    Reading or writing it never fails a run: a broken file is ignored with one warning.

    Args:
        machine: Name from `machine_key`.
        directory: Folder of the files; None keeps nothing.

    Attributes:
        rates: Measured speeds; None before `keep` stores them.
        alignment: Measured gain of aligned sizes; None before `keep` stores it.
        peaks: Measured over predicted peaks by kind, newest last.
    """

    def __init__(self, machine: str, *, directory: Path | None) -> None:
        self.machine = machine
        self.path = None if directory is None else directory / f"{machine}.json"
        self.rates: Rates | None = None
        self.alignment: Alignment | None = None
        self.peaks: Ratios = {}
        self._warned = False

    @classmethod
    def load(cls, machine: str, *, directory: Path | None = None) -> "Calibration":
        """Return the calibration of a machine; an empty one without a readable file.

        The folder is `cache_directory()` by default.
        """
        calibration = cls(machine, directory=directory or cache_directory())
        calibration._read()
        return calibration

    @classmethod
    def of(cls, reading: Reading) -> "Calibration":
        """Return the calibration of the machine and torch version of a reading."""
        total = reading.total.bytes
        return cls.load(machine_key(device=reading.name, total_bytes=total, torch_version=torch.__version__))

    def keep(self, *, rates: Rates | None = None, alignment: Alignment | None = None) -> None:
        """Store measured speeds or alignment; None leaves the stored value."""
        self.rates, self.alignment = rates or self.rates, alignment or self.alignment
        self._write()

    def speeds(self, device: torch.device | str) -> Rates:
        """Return the measured speeds of this machine; the first call measures and stores them.

        The first call takes two to four seconds and some memory of the device: make it before a peak is read.

        The device must be present.
        """
        rates = self.rates or measure_rates(device)
        if self.rates is None:
            self.keep(rates=rates)
        self.gains(device)
        return rates

    def gains(self, device: torch.device | str) -> Alignment:
        """Return the gain of aligned sizes on this machine.

        The first call measures it in half a second.
        """
        alignment = self.alignment or measure_alignment(device)
        if self.alignment is None:
            self.keep(alignment=alignment)
        return alignment

    def record(self, kind: str, *, predicted_bytes: int, measured_bytes: int) -> None:
        """Store the ratio of a step's measured to its predicted peak.

        Args:
            kind: Kind from `kind_of`.
            predicted_bytes: Predicted peak, without the correction of `peak_factor`.
            measured_bytes: The same peak, measured.

        Raises:
            ValueError: If a figure is not positive.
        """
        if not (predicted_bytes > 0 and measured_bytes > 0):
            raise ValueError(
                f"predicted and measured bytes must be positive; these are {predicted_bytes} and {measured_bytes}."
            )
        self._read()  # another process may have recorded steps since
        self.peaks[kind] = [*self.peaks.get(kind, []), measured_bytes / predicted_bytes][-_KEPT:]
        self._write()

    def peak_factor(self, kind: str) -> float:
        """Return the factor for predicted peaks of a kind: the worst recent ratio, from 1.0 to 1.3.

        It never lowers a prediction: one that was too high once may be right the next time, and too low costs a recovery.
        """
        return min(max([1.0, *self.peaks.get(kind, [])]), _MOST)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file as plain values."""
        return {
            "version": _VERSION,
            "machine": self.machine,
            "rates": None if self.rates is None else self.rates.to_dict(),
            "alignment": None if self.alignment is None else self.alignment.to_dict(),
            "peaks": self.peaks,
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
            peaks = _ratios(state["peaks"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if not self._warned:
                log.warning(
                    "The calibration %s cannot be read (%s: %s) and is ignored. The next measured step replaces it.",
                    self.path,
                    type(error).__name__,
                    error,
                )
            self._warned = True
            return
        self.rates, self.alignment, self.peaks = rates, alignment, peaks

    def _write(self) -> None:
        """Write the file atomically; a disk that refuses causes one warning."""
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
    """Return the names of all machines with a calibration, sorted."""
    directory = directory or cache_directory()
    return sorted(path.stem for path in directory.glob("*.json")) if directory is not None else []


def clear_calibrations(directory: Path | None = None) -> list[str]:
    """Delete all calibrations and return the names of their machines."""
    machines = calibrated_machines(directory)
    for machine in machines:
        path = Calibration(machine, directory=directory or cache_directory()).path
        assert path is not None
        path.unlink(missing_ok=True)
    return machines


def _ratios(state: Mapping[str, Any]) -> Ratios:
    found = {str(kind): [float(ratio) for ratio in ratios][-_KEPT:] for kind, ratios in state.items()}
    if not all(0 < ratio < float("inf") for ratios in found.values() for ratio in ratios):
        raise ValueError("a ratio is not positive")
    return found
