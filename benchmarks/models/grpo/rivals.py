"""Compare GRPO's seconds per iteration and peak memory with TRL's.

Our module under our strategy runs beside TRL's `GRPOTrainer` without vLLM, in one run.

A model of Qwen2.5-3B's shape with random weights in bf16, LoRA of rank 16 on the attention's four matrices in float32, bf16 mixed, beta 0, one
prompt an iteration, the same prompt, reward, temperature and learning rate. Random weights do not end a completion, so that all of them are as long as
they may be. Settings:

- `after`: 2 completions of 128 tokens, recomputation, one completion at a time in the loss pass;
- `before`: 2 completions of 512 tokens, no recomputation, both at once;
- `wide`: 8 completions of 1,024 tokens, recomputation, all at once. Its peak is what counts: both sides compute together there, so that its seconds
  are no comparison;
- `cut`: the same on our side only, one completion at a time in the loss pass, as a tight budget has it; beside the rival's `wide`.

Every cell is a process of its own. All begin at once with one iteration each that is not compared: on our side it makes the plan, compiles and
records, on the rival's its completions have only a few tokens, which loads its kernels. Then they wait for their turn, so that nothing else computes
while one is timed. A rival's iteration is from its callback `on_step_begin` to `on_step_end`; ours is from the end of the one before, with the
loader. The peak is `torch.cuda.max_memory_allocated` of all iterations, reset after construction. The rival has one iteration in `wide`.

Usage: python -m benchmarks.models.grpo.rivals [--settings after before wide] [--limit 135]
       (writes benchmarks/models/grpo/rivals.json after every cell; about two minutes on an H200)
       python -m benchmarks.models.grpo.rivals --smoke   (a tiny shape on the CPU, which proves only that it runs)
"""

import argparse
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_suffix(".json")
SETTINGS: dict[str, dict[str, Any]] = {
    "after": {"new": 128, "group": 2, "at_once": 1, "recompute": True, "steps": {"ours": 3, "rival": 3}},
    "before": {"new": 512, "group": 2, "at_once": 2, "recompute": False, "steps": {"ours": 3, "rival": 2}},
    "wide": {"new": 1024, "group": 8, "at_once": 8, "recompute": True, "steps": {"ours": 2, "rival": 1}},
    "cut": {"new": 1024, "group": 8, "at_once": 1, "recompute": True, "steps": {"ours": 2}},
}
BESIDE = {"cut": "wide"}  # whose rival is compared, where there is none of its own
TOGETHER = ("wide", "cut")
SMOKE = {"after": 8, "before": 12, "wide": 16, "cut": 16}  # new tokens
AIMS = {"times_faster": 5.0, "share_of_peak": 0.6}  # at least, in `after` and `before`; at most, in `wide` and `cut`


def main() -> None:
    options = _options()
    if options.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "smoke.json") if options.smoke else options.output
        cells = [
            Cell(setting, side, smoke=options.smoke)
            for setting in options.settings
            for side in SETTINGS[setting]["steps"]
        ]
        ends = time.monotonic() + options.limit
        try:
            for cell in cells:
                cell.wait("ready", until=ends)
            print(f"{options.limit - (ends - time.monotonic()):.0f} s until all are ready", flush=True)
            _measure(cells, output, until=ends)
        finally:
            for cell in cells:
                cell.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--limit", type=float, default=135, help="seconds after which what still runs is given up")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU, written nowhere")
    return parser.parse_args()


class Cell:
    """One side in one setting, in a process that waits for its turn."""

    def __init__(self, setting: str, side: str, *, smoke: bool) -> None:
        self.setting, self.side = setting, side
        self.found: dict[str, Any] = {"setting": setting, "side": side}
        settings = SETTINGS[setting] | ({"new": SMOKE[setting]} if smoke else {})
        context = mp.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_run, args=(there, side, settings, smoke), daemon=False)
        self._process.start()
        there.close()

    def begin(self) -> None:
        """Let it run."""
        if "failed" not in self.found:
            self._here.send("go")

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
        self._process.join(timeout=2 if "failed" not in self.found else 0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(timeout=5)


def _run(parent: Connection, side: str, settings: dict[str, Any], smoke: bool) -> None:
    import traceback

    try:
        from benchmarks.models.grpo.rivals_cell import measure

        def turn() -> None:
            parent.send("ready")
            parent.recv()

        parent.send(measure(side, **settings, smoke=smoke, turn=turn))
    except Exception:
        parent.send({"failed": traceback.format_exc()[-3000:]})


def _measure(cells: list[Cell], output: Path, *, until: float) -> None:
    for setting in dict.fromkeys(cell.setting for cell in cells):
        pair = [cell for cell in cells if cell.setting == setting]
        for turn in [pair] if setting in TOGETHER else [[cell] for cell in pair]:
            for cell in turn:
                cell.begin()
            for cell in turn:
                cell.wait("done", until=until)
                _keep(cell.found, output)
                cell.stop()
    print(json.dumps(json.loads(output.read_text(encoding="utf-8"))["summary"], indent=2))


def _keep(run: dict[str, Any], path: Path) -> None:
    """Add a run to the record, in place of the one of the same cell."""
    from benchmarks.records import origin, write

    print(json.dumps(run), flush=True)
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}
    same = ("setting", "side")
    runs = [each for each in record["runs"] if any(each[name] != run[name] for name in same)] + [run]
    write(
        {**origin("python -m benchmarks.models.grpo.rivals"), "aims": AIMS, "summary": _summary(runs), "runs": runs},
        path,
    )


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return by setting the medians of both sides, and our figures relative to the rival's.

    Medians are of seconds of compared iterations, and of peaks.
    """
    found: dict[str, Any] = {}
    done = {(run["setting"], run["side"]): run for run in runs if "failed" not in run}
    for setting in SETTINGS:
        places = {"ours": (setting, "ours"), "rival": (BESIDE.get(setting, setting), "rival")}
        if not set(places.values()) <= set(done):
            continue
        sides = {side: done[place] for side, place in places.items()}
        found[setting] = {"peak_bytes": {side: run["peak_bytes"] for side, run in sides.items()}}
        if sides["rival"]["peak_bytes"]:
            found[setting]["share_of_peak"] = round(sides["ours"]["peak_bytes"] / sides["rival"]["peak_bytes"], 3)
        if setting not in TOGETHER:
            seconds = {side: round(statistics.median(run["seconds"][1:]), 4) for side, run in sides.items()}
            found[setting] |= {"seconds": seconds, "times_faster": round(seconds["rival"] / seconds["ours"], 2)}
    return found


if __name__ == "__main__":
    main()
