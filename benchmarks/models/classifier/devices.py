"""Train with one effective batch on simulated devices, and compare the losses.

The devices are an 8 GB Mac, a 12 GB card and a CPU.

Each is `train.py experiment=classification` in a process of its own, on the same rows in the same order. Weights begin alike, dropout
is off and everything is computed in float32 by this CPU; what differs is how each batch is cut. The simulated devices have budgets below what
they could give, so that they have to cut it; the CPU does not.

Usage: python -m benchmarks.models.classifier.devices [--steps 6] [--rows 64] [--length 96]
       (writes benchmarks/models/classifier/devices.json; about four minutes on two cores)
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import origin

ROOT = Path(__file__).parents[3]
DEVICES = {
    "cpu": ("hardware=cpu",),
    "simulated M1 8 GB, 1.5 GiB": ("hardware=mps", "simulate=m1-8gb", "memory.budget=1536MiB"),
    "simulated RTX 3060 12 GB, 900 MiB": ("hardware=cuda", "simulate=rtx3060-12gb", "memory.budget=900MiB"),
}
KEPT = ("device", "precision", "effective_batch_size", "micro_batch_size", "peak_bytes")  # of a run's summary
TOLERANCE = 1e-4  # of the loss: float32 sums in another order, through so many steps of AdamW


def train(overrides: tuple[str, ...], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of a run, step by step, and how it was cut."""
    command = [
        sys.executable, str(ROOT / "train.py"), "experiment=classification", f"run_dir={folder}", *overrides,
        f"data.batch_size={options.rows}", f"data.text_length={options.length}", "data.padded_lengths=2", "hardware.num_workers=0",
        "model.dropout=0.0", f"trainer.max_steps={options.steps}", "trainer.max_epochs=1", "trainer.log_every_n_steps=1",
        "hardware.precision=32-true", "trainer.limit_val_batches=0", "seed=1",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command[1:])}\n{ended.stderr[-3000:]}")
    with next(folder.rglob("metrics.csv")).open(encoding="utf-8") as lines:
        losses = [float(row["train/loss"]) for row in csv.DictReader(lines) if row.get("train/loss")]
    summary = json.loads(next(folder.rglob("summary.json")).read_text(encoding="utf-8"))
    return {"overrides": list(overrides), "losses": losses, **{name: summary[name] for name in KEPT}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=64, help="the effective batch, on every device")
    parser.add_argument("--length", type=int, default=96, help="most tokens of a text")
    options = parser.parse_args()
    record = origin(" ".join(["python", *sys.argv]))
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: train(given, Path(folder, str(at)), options) for at, (name, given) in enumerate(DEVICES.items())}
    first = runs["cpu"]["losses"]
    for run in runs.values():
        pairs = zip(first, run["losses"], strict=True)
        run["largest_difference"] = max(abs(other - one) / one for one, other in pairs)
    record |= {
        "steps": options.steps,
        "rows": options.rows,
        "length": options.length,
        "tolerance": TOLERANCE,
        "runs": runs,
    }
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, run in runs.items():
        print(
            f"{name:36} losses {run['losses'][0]:.4f} … {run['losses'][-1]:.4f}, at most {run['largest_difference']:.1e} apart"
        )
    if max(run["largest_difference"] for run in runs.values()) > TOLERANCE:
        raise SystemExit(f"losses are more than {TOLERANCE:g} apart")


if __name__ == "__main__":
    main()
