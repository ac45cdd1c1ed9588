"""Compare LoRA fine-tuning with TRL's `SFTTrainer` and a peft loop: tokens/s, peak memory.

The shapes of SmolLM2-1.7B and Qwen2.5-3B with random weights in bf16, LoRA of rank 16 on all linear layers but the head in float32, bf16 mixed,
16 rows of up to 1,024 tokens a step, fused AdamW, clipping at 1. All sides use torch's SDPA attention: FlashAttention is not installed.

A cell is `model/lengths/side`, with a process of its own. Lengths are `even` (rows of 1,024 tokens) or `ragged` (log-normal, at most 1,024).
Sides, where `-recompute` is with activation checkpointing of every block:

- `trl-padded`: rows are padded to the longest of their batch;
- `trl-packed`: best-fit packing, whose batches TRL flattens into one row without padding; examples do not attend to each other;
- `trl-wrapped`: examples are joined, then cut into rows; they attend to each other, which is another training. Even lengths have none;
- `peft`: a plain loop over padded rows, with transformers' own loss;
- `ours-100`, `ours-70`: the finetune system under `UnifiedStrategy(budget=…)`, the budget at 100 % or 70 % of the allocated peak of the fastest
  TRL side of the same checkpointing; rows are packed where lengths are ragged, and examples do not attend to each other.

Run only where a name or pattern has a `+`: `trl-padded+selective` (TRL's selective checkpointing), and `ours-…+compiled` (`compile="blocks"`).

Tokens per second are of 6 steps after 17, between the exactness checks of batches 16 and 32, from one wait for the device to another, loader
included, pads not counted. Peaks are
`torch.cuda.max_memory_allocated` and `max_memory_reserved` over all 23 steps, reset after construction. All processes import first; each then
has the device for itself. A cell that fails is recorded with its error.

Usage: python -m benchmarks.models.finetune.rivals [--cells 'smollm2/*' …] [--seconds 400]
       (writes benchmarks/models/finetune/rivals.json after every cell; needs trl and datasets, in a folder called site-packages, or dill
        pickles their modules)
       python -m benchmarks.models.finetune.rivals --smoke   (a tiny shape on the CPU, which proves only that it runs)
"""

import argparse
import json
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_suffix(".json")
AIMS = {"times_faster": 1.2, "share_of_peak": 0.7}  # at least, at its peak; or at most, at its speed
CELL_SECONDS = 200  # a cell that takes longer is given up
WAITING = 3 * (os.cpu_count() or 1)  # processes that import at once
SHARES = {"ours-100": 1.0, "ours-70": 0.7}
SIDES: dict[str, dict[str, Any]] = {
    f"{name}{suffix}": {**settings, "recompute": recompute}
    for name, settings in {
        "trl-padded": {"trainer": "trl", "rows": "padded"},
        "trl-wrapped": {"trainer": "trl", "rows": "wrapped"},
        "trl-packed": {"trainer": "trl", "rows": "bfd"},
        "ours-100": {"trainer": "ours"},
        "ours-70": {"trainer": "ours"},
        "peft": {"trainer": "peft"},
    }.items()
    for suffix, recompute in (("-recompute", True), ("", False))
}
VARIANTS: dict[str, dict[str, Any]] = {
    "trl-padded+selective": {"trainer": "trl", "rows": "padded", "recompute": "selective"}
} | {f"{name}+compiled": {**settings, "compiled": True} for name, settings in SIDES.items() if name.startswith("ours")}
EVEN_LACKS = ("trl-wrapped", "trl-wrapped-recompute")
CELLS = [
    f"{model}/{lengths}/{side}"
    for model in ("smollm2", "qwen")
    for lengths in ("even", "ragged")
    for side in SIDES | VARIANTS
    if not (lengths == "even" and side in EVEN_LACKS)
]


def main() -> None:
    options = _options()
    if options.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    ends = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HOME": folder, "LIGHTNING_UNIFIED_STATE_DIR": str(Path(folder, "state"))}
        output = Path(folder, "smoke.json") if options.smoke else options.output
        names = chosen(options.cells)
        for start in range(0, len(names), WAITING):
            _measure(names[start : start + WAITING], output, smoke=options.smoke, until=ends)
        print(table(_runs(output)))


def _measure(names: Sequence[str], output: Path, *, smoke: bool, until: float) -> None:
    """Start the cells' processes together, then let one after the other have the device."""
    began = time.monotonic()
    cells = [Cell(name, smoke=smoke) for name in names]
    try:
        for cell in cells:
            cell.wait("ready", until=until)
        print(f"{time.monotonic() - began:.0f} s until {len(cells)} processes are ready", flush=True)
        for cell in cells:
            cell.begin(_runs(output), smoke=smoke)
            cell.wait("done", until=min(until, time.monotonic() + CELL_SECONDS))
            _keep(cell.found, output)
            cell.stop()
    finally:
        for cell in cells:
            cell.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["*"], help="names, or patterns of names (default: *)")
    parser.add_argument("--seconds", type=float, default=400, help="what runs or waits after them is given up")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU, written nowhere")
    return parser.parse_args()


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the cells of `patterns`, rivals first; cells with a `+` only for patterns with one.

    Raises:
        SystemExit: If a pattern names no cell.
    """
    found: set[str] = set()
    for pattern in patterns:
        named = {name for name in CELLS if fnmatchcase(name, pattern) and ("+" in pattern or "+" not in name)}
        if not named:
            raise SystemExit(f"--cells {pattern}: no such cell; cells are {', '.join(CELLS)}.")
        found |= named
    return [name for name in CELLS if name in found]


class Cell:
    """One side in one setting, in a process that waits for its turn."""

    def __init__(self, name: str, *, smoke: bool) -> None:
        self.model, self.lengths, self.side = name.split("/")
        self.settings = dict((SIDES | VARIANTS)[self.side])
        self.found: dict[str, Any] = {"cell": name}
        context = mp.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_run, args=(there, smoke), daemon=False)
        self._process.start()
        there.close()

    def begin(self, runs: Sequence[dict[str, Any]], *, smoke: bool) -> None:
        """Let it run, with the budget that the recorded runs of rivals give ours."""
        if "failed" in self.found:
            return
        settings = dict(self.settings)
        if settings["trainer"] == "ours":
            recompute = settings.pop("recompute")
            budget = 2**30 if smoke else budget_of(self.found["cell"], runs, recompute=recompute)
            if budget is None:
                self.found["failed"] = "no budget: no side of TRL with the same checkpointing has a peak"
                return
            settings["budget"] = budget
        self._here.send({"model": self.model, "lengths": self.lengths, **settings})

    def wait(self, what: str, *, until: float) -> None:
        """Take in what it sends next, or why it sends nothing."""
        if "failed" in self.found:
            return
        try:
            if not self._here.poll(max(until - time.monotonic(), 0)):
                self.found["failed"] = f"no time was left: not {what}"
                return
            said = self._here.recv()
        except EOFError:
            said = {"failed": "its process ended"}
        self.found |= {} if said == "ready" else said

    def stop(self) -> None:
        """End its process."""
        self._process.join(timeout=5 if "tokens_per_second" in self.found else 0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()


def _run(parent: Connection, smoke: bool) -> None:
    import traceback

    try:
        from benchmarks.models.finetune.rivals_cell import measure

        parent.send("ready")
        parent.send(measure(**parent.recv(), smoke=smoke))
    except Exception:
        parent.send({"failed": traceback.format_exc()[-1500:]})


def _runs(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []


def _keep(run: dict[str, Any], path: Path) -> None:
    """Add a run to the record, in place of the one of the same cell."""
    from benchmarks.records import origin, write

    print(json.dumps(run), flush=True)
    runs = [each for each in _runs(path) if each["cell"] != run["cell"]] + [run]
    write(
        {**origin("python -m benchmarks.models.finetune.rivals"), "aims": AIMS, "summary": summary(runs), "runs": runs},
        path,
    )


def _of_group(cell: str, runs: Sequence[dict[str, Any]], trainer: str) -> dict[str, dict[str, Any]]:
    """Return by side the runs of a trainer that succeeded, with the model and lengths of `cell`."""
    group = cell.rpartition("/")[0]
    return {
        run["cell"].rpartition("/")[2]: run
        for run in runs
        if run["cell"].startswith(f"{group}/{trainer}") and "failed" not in run
    }


def budget_of(cell: str, runs: Sequence[dict[str, Any]], *, recompute: bool) -> int | None:
    """Return a share of the peak of TRL's fastest run with equal checkpointing, if any."""
    share = next(share for name, share in SHARES.items() if cell.rpartition("/")[2].startswith(name))
    rivals = [
        run
        for side, run in _of_group(cell, runs, "trl").items()
        if side.endswith("-recompute") == recompute and side in SIDES and run["peak_bytes"]
    ]
    fastest = max(rivals, key=lambda run: run["tokens_per_second"], default=None)
    return None if fastest is None else int(share * fastest["peak_bytes"])


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return by rival our highest relative speed in its peak, and lowest relative peak.

    The peak is the lowest of runs that reach the rival's speed.

    A ratio is None where no run of ours is within the peak, or as fast. `meets` is by the aims.
    """
    found: dict[str, Any] = {}
    for rival in runs:
        if "failed" in rival or not rival["peak_bytes"] or rival["cell"].rpartition("/")[2].startswith("ours"):
            continue
        ratios = [
            (run["tokens_per_second"] / rival["tokens_per_second"], run["peak_bytes"] / rival["peak_bytes"])
            for run in _of_group(rival["cell"], runs, "ours").values()
        ]
        faster = max((speed for speed, peak in ratios if peak <= 1), default=None)
        smaller = min((peak for speed, peak in ratios if speed >= 1), default=None)
        found[rival["cell"]] = {
            "times_faster": faster and round(faster, 3),
            "share_of_peak": smaller and round(smaller, 3),
            "meets": (faster or 0) >= AIMS["times_faster"] or (smaller or 1) <= AIMS["share_of_peak"],
        }
    return found


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the runs as a Markdown table."""
    from benchmarks.records import markdown

    met = summary(runs)
    rows: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: CELLS.index(run["cell"])):
        gib = {
            name: None if not run.get(key) else f"{run[key] / 2**30:.2f}"
            for name, key in (
                ("budget, GiB", "budget"),
                ("allocated, GiB", "peak_bytes"),
                ("reserved, GiB", "reserved_bytes"),
            )
        }
        speed = {"tokens/s": f"{run['tokens_per_second']:,.0f}" if "failed" not in run else "failed"}
        ratios = met.get(run["cell"], dict.fromkeys(("times_faster", "share_of_peak", "meets")))
        rows[run["cell"]] = speed | gib | {"rows at once": run.get("micro_batch_size")} | ratios
    return markdown(rows, first="cell") if rows else "no runs"


if __name__ == "__main__":
    main()
