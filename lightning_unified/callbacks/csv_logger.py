"""`RunCSVLogger`: one `metrics.csv` for a run and all its resumes."""

import csv
import io
import os
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_unified.errors import check_count

__all__ = ["RunCSVLogger"]


class RunCSVLogger(CSVLogger):
    """Write `<save_dir>/metrics.csv`, and append to it when a run is resumed in the same folder.

    Lightning's `CSVLogger` deletes an existing file. This logger appends rows, and adds new columns after the old ones. Steps that a
    resumed run repeats appear twice; the later rows are the resumed run's. Metrics of one step between two flushes share a row.

    Args:
        save_dir: The run's folder.
        flush_every: Log calls between two writes to the disk.
        prefix: Prefix of each metric's name.

    Raises:
        ConfigurationError: If `flush_every` is less than 1.
    """

    def __init__(self, save_dir: str | Path, *, flush_every: int = 10, prefix: str = "") -> None:
        check_count("RunCSVLogger: flush_every", flush_every)
        super().__init__(save_dir, name="", version="", prefix=prefix, flush_logs_every_n_steps=flush_every)
        self._calls = 0

    @property
    @override
    def log_dir(self) -> str:
        return self.save_dir

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> "_AppendingWriter":
        if self._experiment is None:
            self._experiment = _AppendingWriter(self.save_dir)
        return self._experiment  # pyright: ignore[reportReturnType]

    @override
    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Tensor | float], step: int | None = None) -> None:
        joined = {
            f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name: v for name, v in metrics.items()
        }
        self.experiment.log_metrics(joined, step)
        # Count calls: metrics logged every n-th step may never meet Lightning's rule, (step + 1) divisible by n.
        self._calls += 1
        if self._calls % self._flush_logs_every_n_steps == 0:
            self.save()


class _AppendingWriter(ExperimentWriter):
    """Buffers rows until they are saved, and preserves the columns and rows of an existing file."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir=log_dir)
        self._path = Path(self.metrics_file_path)
        if self._path.exists():
            with self._path.open(newline="") as file:
                text = file.read()
            self.metrics_keys = next(csv.reader(io.StringIO(text)), [])
            if text and not text.endswith("\n"):  # the previous run was killed while it wrote a line
                with self._path.open("a", newline="") as file:
                    file.write("\r\n")

    @override
    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics_dict.items()}
        row["step"] = len(self.metrics) if step is None else step
        if self.metrics and self.metrics[-1]["step"] == row["step"] and _agree(self.metrics[-1], row):
            self.metrics[-1].update(row)
        else:
            self.metrics.append(row)

    @override
    def save(self) -> None:
        if not self.metrics:
            return
        known = set(self.metrics_keys)
        new = sorted({name for row in self.metrics for name in row} - known, key=lambda name: (name != "step", name))
        if new:
            self.metrics_keys = [*self.metrics_keys, *new]
            self._rewrite()
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, fieldnames=self.metrics_keys).writerows(self.metrics)
        self.metrics = []

    @override
    def _check_log_dir_exists(self) -> None:
        """Keep an existing file; Lightning's method (2.6.6) deletes it and warns."""

    def _rewrite(self) -> None:
        """Rewrite the file with its new header, atomically."""
        rows = []
        if self._path.exists():
            with self._path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self._path)


def _agree(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row[name] == value for name, value in other.items() if name in row)
