"""Records of benchmarks: origin, the JSON file beside the script, and tables.

The origin is the machine and the command.
"""

import argparse
import datetime as dt
import json
import logging
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

__all__ = ["cell", "markdown", "origin", "prepare", "record_measures", "write"]


def prepare(name: str) -> Path:
    """Return a folder for the files of the runs.

    This process then computes in one thread and logs warnings only.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    os.environ["LIGHTNING_UNIFIED_STATE_DIR"] = str(folder / "state")  # these runs are nobody's to watch
    return folder


def origin(command: str) -> dict[str, Any]:
    """Return where and with what a record was made."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    processors = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "command": command,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": {
            "processor": processors[0] if processors else platform.processor() or "unknown",
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "lightning", "torchmetrics", "numpy")},
    }


def write(record: dict[str, Any], path: Path) -> None:
    """Write the record, one run a line."""
    runs = record.get("runs", [])
    text = json.dumps({**record, "runs": []}, indent=1, ensure_ascii=False).removesuffix('"runs": []\n}')
    lines = ",\n  ".join(json.dumps(run, ensure_ascii=False) for run in runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text}"runs": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def record_measures(module: str, script: Path, measures: Iterable[Callable[[], Any]]) -> int:
    """Run `measures`, print their results, and write them to JSON; return the exit code.

    The file lies beside `script`.

    Args:
        module: The script's module below `benchmarks`, as in `claims.cpu`.
        script: The script's file.
        measures: Functions without arguments; the name of each is the key of its result.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")
    parser.add_argument("--output", type=Path, default=script.with_suffix(".json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {}
    for measure in measures:
        found[measure.__name__] = measure()
        print(measure.__name__, json.dumps(found[measure.__name__], indent=2, ensure_ascii=False), flush=True)
    about = origin(f"python -m benchmarks.{module}")
    about["machine"]["threads"] = torch.get_num_threads()
    about["versions"] |= {name: version(name) for name in ("tokenizers", "omegaconf", "pyyaml")}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(about | found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def markdown(rows: dict[str, dict[str, Any]], *, first: str) -> str:
    """Return `rows`, name to cells, as a table; `first` heads the column of names."""
    heads = list(next(iter(rows.values())))
    lines = [f"| {first} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(map(cell, cells.values())) + " |" for name, cells in rows.items()]
    return "\n".join(lines)


def cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2g}" if isinstance(value, float) else str(value)
