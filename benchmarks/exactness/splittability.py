"""Measure the exactness check: its cost beside a step, and its error rate.

The error rate is taken over modules whose correct verdict is known.

Three parts:

- `cost`: the first check of a fit, and a later one, in milliseconds and in steps.
- `judged`: the modules of tests/support/modules/split.py, several seeds, four precisions. A false alarm is a module that can be split
  and is refused; a miss is one that cannot and is split; a wrong rule is one under which gradients are not the whole batch's.
- `sound`: nine sound modules with dropout on (tests/support/modules/sound.py), several seeds, three precisions. All must be split.

Usage: python -m benchmarks.exactness.splittability [--seeds 5] [--sound-seeds 4]
       (writes benchmarks/exactness/splittability.json; about 4 minutes on one thread of a Xeon; transformers must be installed)
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.records import markdown, origin, prepare
from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.models.gearhead import GearHead
from lightning_unified.step.exactness.check import ExactnessCheck
from lightning_unified.step.split.rules import rules_of
from tests.support.modules.plain import MLP, RaggedTokens, Rows
from tests.support.modules.sound import OPTIONS, SOUND
from tests.support.modules.split import EXPECTED, Tokens

RESULTS = Path(__file__).with_suffix(".json")
JUDGED = {**EXPECTED, MLP: "rows", RaggedTokens: "loss_weight"}
PRECISIONS = ("64-true", "32-true", "bf16-mixed", "bf16-true")
SOUND_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class StepTimes(L.Callback):
    """Notes the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def fit(
    module: L.LightningModule, loader: DataLoader, *, size: int, precision: str, checks: bool = True, **options: Any
) -> UnifiedStrategy:
    strategy = UnifiedStrategy(micro_batch_size=size, batch_norm="micro", check_split=checks)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader)
    return strategy


def answer(kind: Any, loader: DataLoader, *, precision: str, seed: int, **options: Any) -> tuple[str, float | None]:
    """Return the rule that the check finds, and the gradients' difference under it.

    The rule is `"refused"` or `"unchecked"` where none is found.
    """
    torch.manual_seed(seed)
    module = kind().to(torch.float64 if precision == "64-true" else torch.float32)
    try:
        strategy = fit(module, loader, size=max(rules_of(module, "fit").unit, 3), precision=precision, **options)
    except SplitError:
        return "refused", None
    reason = strategy.plan.reasons["loss_weight"]
    if "unchecked" in reason:
        return "unchecked", None
    return reason.split(": ")[0], float(reason.rsplit(" ", 1)[1])


def outcome(found: str, expected: str) -> str:
    """Return what an answer is, for the tally."""
    if found == expected:
        return "right"
    if found in ("refused", "unchecked"):
        return "false alarms" if found == "refused" else "undecided"
    return "misses" if expected == "refused" else "wrong rules"


def loader_of(kind: Any, *, seed: int, precision: str) -> DataLoader:
    dtype = torch.float64 if precision == "64-true" else torch.float32
    if kind is RaggedTokens:
        return kind.loader()
    return kind.loader(dtype=dtype) if kind is MLP else kind.loader(seed, dtype)


def judged(seeds: int) -> dict[str, Any]:
    """Return the tally of each precision, the largest accepted difference, and wrong answers."""
    result = {}
    for precision in PRECISIONS:
        tally = dict.fromkeys(("runs", "right", "false alarms", "misses", "wrong rules", "undecided"), 0)
        differences, others = [0.0], []
        for kind, expected in JUDGED.items():
            for seed in range(seeds):
                loader = loader_of(kind, seed=seed, precision=precision)
                found, difference = answer(kind, loader, precision=precision, seed=seed)
                what = outcome(found, expected)
                tally["runs"] += 1
                tally[what] += 1
                differences.append(difference or 0.0)
                if what != "right":
                    others.append({"module": kind.__name__, "seed": seed, "found": found, "expected": expected})
        result[precision] = {**tally, "largest difference accepted": max(differences), "not right": others}
    return result


def sound(seeds: int) -> dict[str, Any]:
    """Return how many runs of sound modules were split by the right rule, and the others."""
    result = {}
    for precision in SOUND_PRECISIONS:
        runs, differences, others = 0, [0.0], []
        for kind in SOUND:
            for seed in range(seeds):
                found, difference = answer(
                    kind, kind.loader(seed), precision=precision, seed=seed, **OPTIONS.get(kind, {})
                )
                runs += 1
                differences.append(difference or 0.0)
                if found != kind.rule:
                    others.append({"module": kind.__name__, "seed": seed, "found": found, "expected": kind.rule})
        result[precision] = {
            "runs": runs,
            "split": runs - len(others),
            "largest difference accepted": max(differences),
            "not split": others,
        }
    return result


def gearhead_loader(rows: int, length: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    data = []
    for _ in range(rows * 8):
        tokens = torch.randint(1, 2000, (length,), generator=generator)
        data.append(
            {
                "input_ids": tokens,
                "labels": tokens,
                "error_code_ids": torch.zeros_like(tokens),
                "diagnosis_labels": torch.full_like(tokens, -100),
            }
        )
    return DataLoader(Rows(data), batch_size=rows)


@contextmanager
def timed_checks() -> Iterator[list[float]]:
    """Yield the seconds of every check made inside the block."""
    seconds: list[float] = []
    plain = ExactnessCheck._check

    def timed(self: ExactnessCheck, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        try:
            plain(self, *args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    ExactnessCheck._check = timed
    try:
        yield seconds
    finally:
        ExactnessCheck._check = plain


def small_gearhead() -> L.LightningModule:
    return GearHead(
        preset="gearhead-small", vocabulary=2000, positions=128, width=128, layers=2, heads=4, feed_forward=512
    )


def cost() -> dict[str, dict[str, float]]:
    """Return milliseconds of the first and of later checks, and a later check's cost in steps.

    The cost is the number of unchecked steps that take as long.
    """
    cases: dict[str, tuple[Callable[[], Any], Callable[[], DataLoader], int]] = {
        "a net of two layers, batch 8 as 3+3+2": (MLP, lambda: MLP.loader(rows=80, dtype=torch.float32), 3),
        "tokens of eleven kinds, batch 8 as 3+3+2": (Tokens, Tokens.loader, 3),
        "GearHead (2 layers of 128), batch 16 as 4x4, 128 tokens": (
            small_gearhead,
            lambda: gearhead_loader(16, 128),
            4,
        ),
    }
    result = {}
    for name, (make, loader, size) in cases.items():
        torch.manual_seed(0)
        first, later, steps = [], [], []
        for _ in range(5):
            times = StepTimes()
            with timed_checks() as seconds:
                fit(make(), loader(), size=size, precision="32-true")
            fit(make(), loader(), size=size, precision="32-true", checks=False, callbacks=[times])
            first.append(seconds[0])
            later.append(statistics.median(seconds[1:]))
            steps.append(statistics.median(times.seconds[2:]))
        step = statistics.median(steps)
        result[name] = {
            "first check, ms": statistics.median(first) * 1e3,
            "later check, ms": statistics.median(later) * 1e3,
            "step, ms": step * 1e3,
            "later check, steps": statistics.median(later) / step,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sound-seeds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    prepare("splittability")
    logging.getLogger("lightning_unified").setLevel(logging.ERROR)
    began = time.perf_counter()
    parts = {"cost": cost(), "sound": sound(options.sound_seeds), "judged": judged(options.seeds)}
    record = {
        **origin("python -m benchmarks.exactness.splittability"),
        "seeds": options.seeds,
        "sound_seeds": options.sound_seeds,
        "seconds": round(time.perf_counter() - began),
        "modules": [kind.__name__ for kind in JUDGED],
        "sound_modules": [kind.__name__ for kind in SOUND],
        **parts,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, table in parts.items():
        short = {row: {k: v for k, v in cells.items() if not isinstance(v, list)} for row, cells in table.items()}
        print(markdown(short, first=name), end="\n\n")


if __name__ == "__main__":
    main()
