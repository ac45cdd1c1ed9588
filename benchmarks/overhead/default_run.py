"""The default run of `make train`, and Kneser–Ney models of the same tokens.

The record holds the run's whole summary.

Usage: python -m benchmarks.overhead.default_run [override …]      (writes benchmarks/overhead/default_run.json; minutes)
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = (
    "model",
    "parameters",
    "device",
    "precision",
    "effective_batch_size",
    "micro_batch_size",
    "steps",
    "seconds",
    "tokens_per_second",
    "peak_bytes",
    "recoveries",
    "validation",
    "versions",
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        begun = time.perf_counter()
        subprocess.run([sys.executable, ROOT / "train.py", *sys.argv[1:], f"run_dir={run}"], check=True)
        whole = time.perf_counter() - begun
        summary = json.loads((run / "summary.json").read_text())
    result = {
        "command": " ".join(["python -m benchmarks.overhead.default_run", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "seconds_from_start_to_end": round(whole, 1),
        **{key: summary[key] for key in KEPT},
    }
    print(json.dumps(result, indent=2))
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps(result, indent=2) + "\n")
