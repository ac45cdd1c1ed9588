"""Compare fine-tuning a classifier with Hugging Face's `Trainer` in its three paddings.

Compared are samples per second and peak memory.

The same rows (token ids, log-normal lengths of 6 to 128), the same shapes of BERT with random weights, 64 rows a step, bf16 mixed, fused
AdamW, clipping at 1, four loader processes that stay, pinned batches. The rival pads all to 128, pads each batch to its own longest row, or groups rows
by length. Ours is what a run has by default: `strategy="unified"` with its plan, `TextClassifier`, our rows and loader with a few fixed
lengths, memory monitor, gradient health, pressure guard, and a CSV log every 10 steps; `graphs` is the same with `CudaGraphs`, and
`-within` is either with `memory.budget` at 0.78 of what the fastest rival so far reserved and nothing recomputed, so that batches
of the longest rows are cut. Neither validates, saves or draws a bar.

Every cell is a process of its own that trains two epochs, and the order of the cells turns round from one repeat to the next; with
`--together` those of a repeat start at once, and take turns once they have imported what they need. Both epochs are timed
on both sides, from one wait for the device to another: the first has all that a run does once (kernels are loaded and chosen, loader
processes started, and on our side the plan made and graphs recorded), the second has none of it. The second is compared. Memory is read
in two ways on both sides, over both epochs: `torch.cuda.max_memory_allocated`, which does not see the activations of a replayed graph, and
`torch.cuda.max_memory_reserved`, which does, and is what a budget caps.

Usage: python -m benchmarks.models.classifier.rivals [--models minilm bert-base] [--cells pad128 ours …] [--repeats 2]
       (adds to benchmarks/models/classifier/rivals.json; under a minute a cell on a GPU)
       python -m benchmarks.models.classifier.rivals --smoke   (a tiny shape on the CPU, which proves only that it runs)
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_suffix(".json")
MODELS: dict[str, dict[str, Any]] = {
    "minilm": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "bert-base": {},
    "smoke": {
        "vocab_size": 500,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    },
}
RIVALS = ("pad128", "dynamic", "grouped")
CELLS = (*RIVALS, "ours", "graphs", "ours-within", "graphs-within")
WITHIN = 0.78  # of what the fastest rival reserved
AIMS = {"second_epoch": 1.5, "peak_bytes": 0.8, "reserved_bytes": 0.8}  # at least, and at most, of the fastest rival's


def main() -> None:
    options = _options()
    if options.cell:
        from benchmarks.models.classifier.rivals_cell import run_cell

        print(
            json.dumps(
                run_cell(
                    options.cell,
                    options.models[0],
                    rows=options.rows,
                    batch=options.batch,
                    budget=options.budget,
                    turn=options.turn,
                )
            )
        )
        return
    if options.smoke:
        options.models, options.rows, options.batch, options.repeats = ["smoke"], 160, 8, 1
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "smoke.json") if options.smoke else options.output
        for repeat in range(options.repeats):
            for model in options.models:
                cells = options.cells[:: -1 if repeat % 2 else 1]
                for found in _runs(cells, model, options, output=output, turn=Path(folder, "turn")):
                    _keep(found | {"repeat": repeat}, output)
        print(_table(json.loads(output.read_text(encoding="utf-8"))["summary"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["minilm", "bert-base"])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--cell", choices=CELLS, help="one of them, in this process")
    parser.add_argument(
        "--budget", type=int, help="bytes that a cell of ours may use; set for those that end in -within"
    )
    parser.add_argument("--turn", type=Path, help="a file that whoever measures holds; set for cells")
    parser.add_argument("--together", action="store_true", help="start the cells of a model at once")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", type=int, default=12800)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU, written nowhere")
    return parser.parse_args()


def _runs(
    cells: Sequence[str], model: str, options: argparse.Namespace, *, output: Path, turn: Path
) -> Iterator[dict[str, Any]]:
    """Yield what each cell has measured in a process of its own, or how it failed."""

    def begin(cell: str) -> tuple[str, int | None, subprocess.Popen[str]]:
        budget = _budget(model, output) if cell.endswith("-within") else None
        return cell, budget, _begin(cell, model=model, options=options, budget=budget, turn=turn)

    begun = map(begin, cells)
    for cell, budget, process in list(begun) if options.together else begun:
        said, complaint = process.communicate()
        found: dict[str, Any] = {"model": model, "cell": cell, "budget": budget}
        if process.returncode:
            found["failed"] = _error(complaint)
            print(f"{model} {cell} failed:\n{found['failed']}", flush=True)
        else:
            found |= json.loads(said.strip().splitlines()[-1])
            first, second = found["samples_per_second"]
            print(f"{model} {cell}: {first:,.0f} samples/s in the first epoch, {second:,.0f} in the second", flush=True)
        yield found


def _error(complaint: str) -> str:
    """Return the last error in what a process complained, without the way there."""
    starts = [match.start() for match in re.finditer(r"^[\w.]+(Error|Exception|Interrupt)\b", complaint, re.MULTILINE)]
    return complaint[max(starts, default=0) :].strip()


def _begin(
    cell: str, *, model: str, options: argparse.Namespace, budget: int | None, turn: Path
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.models.classifier.rivals",
        "--cell",
        cell,
        "--models",
        model,
        "--turn",
        str(turn),
    ]
    command += ["--rows", str(options.rows), "--batch", str(options.batch)]
    if budget is not None:
        command += ["--budget", str(budget)]
    environment = (
        os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if options.smoke else {}) | {"TOKENIZERS_PARALLELISM": "false"}
    )
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def _budget(model: str, path: Path) -> int | None:
    """Return the budget of a run held below the fastest rival's peak.

    None while no rival's peak is known.
    """
    summary = json.loads(path.read_text(encoding="utf-8"))["summary"].get(model, {}) if path.exists() else {}
    peak = summary["cells"][summary["fastest_rival"]]["reserved_bytes"] if "fastest_rival" in summary else 0
    return int(WITHIN * peak) or None


def _keep(run: dict[str, Any], path: Path) -> None:
    """Add a run to the record, in place of the one of the same cell and repeat."""
    from benchmarks.records import origin, write

    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}
    same = ("model", "cell", "repeat")
    runs = [each for each in record["runs"] if any(each[name] != run[name] for name in same)] + [run]
    write(
        {
            **origin("python -m benchmarks.models.classifier.rivals"),
            "aims": AIMS,
            "summary": _summary(runs),
            "runs": runs,
        },
        path,
    )


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, by model, each cell's medians and ours as a ratio to the fastest rival's."""
    found: dict[str, Any] = {}
    for model in dict.fromkeys(run["model"] for run in runs):
        cells = {
            cell: _medians([run for run in runs if run["model"] == model and run["cell"] == cell]) for cell in CELLS
        }
        cells = {cell: figures for cell, figures in cells.items() if figures}
        rivals = {cell: cells[cell]["second_epoch"] for cell in RIVALS if cell in cells}
        found[model] = {"cells": cells}
        if not rivals:
            continue
        fastest = max(rivals, key=rivals.__getitem__)
        found[model]["fastest_rival"] = fastest
        for cell in cells.keys() - set(RIVALS):
            found[model][cell] = {
                name: round(cells[cell][name] / cells[fastest][name], 3) for name in cells[cell] if cells[fastest][name]
            }
    return found


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    done = [run for run in runs if "failed" not in run]
    if not done:
        return {}
    return {
        "first_epoch": round(statistics.median(run["samples_per_second"][0] for run in done), 1),
        "second_epoch": round(statistics.median(run["samples_per_second"][1] for run in done), 1),
        "peak_bytes": statistics.median(run["peak_bytes"] or 0 for run in done),
        "reserved_bytes": statistics.median(run["reserved_bytes"] or 0 for run in done),
    }


def _table(summary: dict[str, Any]) -> str:
    """Return the medians as a Markdown table, with ratios to the fastest rival in brackets."""
    head = "samples/s, 2nd epoch", "1st epoch", "allocated, GiB", "reserved, GiB"
    columns = ("second_epoch", "first_epoch", "peak_bytes", "reserved_bytes")
    lines = [f"| model | cell | {' | '.join(head)} |", f"|---|---|{'---:|' * len(head)}"]
    for model, found in summary.items():
        for cell, figures in found["cells"].items():
            ratios = found.get(cell, {})
            values = [
                (f"{figures[name] / 2**30:.3f}" if name.endswith("_bytes") else f"{figures[name]:,.0f}")
                + (f" ({ratios[name]:.2f})" if name in ratios else "")
                for name in columns
            ]
            mark = " (fastest rival)" if cell == found.get("fastest_rival") else ""
            lines.append(f"| {model} | {cell}{mark} | {' | '.join(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
