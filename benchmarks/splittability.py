"""Measures the check before the first cut: its cost beside one step, its rounding, and how often it errs over the tests' modules.

    python benchmarks/splittability.py [--seeds 5] [--output benchmarks/results/splittability.json]

Takes a minute or two on two cores. A false alarm is a module that can be cut and is refused; a miss is one that cannot and is
accepted; a wrong rule is one under which gradients are not the whole batch's.
"""

import argparse
import json
import logging
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import ClassVar

import lightning as L
import torch

import lightning_unified.training.loop  # noqa: F401  # its check is replaced by one that is timed
from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.models.gearhead import GearHead
from lightning_unified.training import splittability
from lightning_unified.training.rules import rules_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))
from modules import MLP, RaggedTokens, Rows
from split_modules import EXPECTED, Tokens

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
EXPECTED = {**EXPECTED, MLP: "rows", RaggedTokens: "loss_weight"}
PRECISIONS = ("64-true", "32-true", "bf16-mixed")


class Timed(splittability.SplittabilityCheck):
    """Notes the seconds of each verdict."""

    seconds: ClassVar[list] = []

    def verdict(self, *args, **kwargs):
        start = time.perf_counter()
        try:
            return super().verdict(*args, **kwargs)
        finally:
            self.seconds.append(time.perf_counter() - start)


class StepTimes(L.Callback):
    def __init__(self):
        self.seconds = []

    def on_train_batch_start(self, *_):
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_):
        self.seconds.append(time.perf_counter() - self.start)


def fit(module, loader, *, size, precision="32-true", callbacks=(), **options):
    strategy = UnifiedStrategy(micro_batch_size=size, batch_norm="micro")
    trainer = L.Trainer(strategy=strategy, precision=precision, callbacks=list(callbacks), **options, **QUIET)
    trainer.fit(module, loader)
    return strategy


def outcome(kind, *, precision, seed):
    """What the check says of a module, and the difference it found under the rule taken or, at least, under those refused."""
    torch.manual_seed(seed)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    loader = kind.loader(dtype=dtype) if kind is MLP else kind.loader() if kind is RaggedTokens else None
    loader = loader or kind.loader(seed, dtype)
    module = kind().to(dtype)
    size = max(rules_of(module, "fit").unit, 3)
    try:
        reason = fit(module, loader, size=size, precision=precision, max_epochs=1).plan.reasons["loss_weight"]
    except SplitError as error:
        tried = str(error).split("halves by (")[1].split(")")[0].split("; ")
        return "refused", min(float(each.rsplit(" ", 1)[1]) for each in tried)
    if "unchecked" in reason:
        return "unchecked", None
    return reason.split(": ")[0], float(reason.rsplit(" ", 1)[1])


def judged(*, seeds):
    result = {}
    for precision in PRECISIONS:
        counts = {"runs": 0, "right": 0, "false alarms": 0, "misses": 0, "wrong rules": 0, "not told": 0}
        accepted, refused, wrong = [], [], []
        for kind, expected in EXPECTED.items():
            for seed in range(seeds):
                found, difference = outcome(kind, precision=precision, seed=seed)
                if found == expected:
                    what = "right"
                elif found == "refused":
                    what = "false alarms"
                elif found == "unchecked":
                    what = "not told"
                else:
                    what = "misses" if expected == "refused" else "wrong rules"
                counts["runs"] += 1
                counts[what] += 1
                if what != "right":
                    wrong.append({"module": kind.__name__, "seed": seed, "found": found, "expected": expected})
                if difference is not None:
                    (refused if found == "refused" else accepted).append(difference)
        result[precision] = {
            **counts,
            "largest difference accepted": max(accepted),
            "smallest difference refused": min(refused),
            "not right": wrong,
        }
    return result


def gearhead_loader(rows, length):
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
    return torch.utils.data.DataLoader(Rows(data), batch_size=rows)


def cost():
    """Milliseconds of the check, and as a share of the median step of the same run, of a small net and of two transformers."""
    cases = {
        "a net of two layers, batch 8 as 3+3+2": (MLP, lambda: MLP.loader(rows=80, dtype=torch.float32), 3),
        "tokens of eleven kinds, batch 8 as 3+3+2": (Tokens, Tokens.loader, 3),
        "GearHead (2 layers of 128), batch 16 as 4x4, 128 tokens": (
            lambda: GearHead(
                preset="gearhead-small", vocabulary=2000, positions=128, width=128, layers=2, heads=4, feed_forward=512
            ),
            lambda: gearhead_loader(16, 128),
            4,
        ),
    }
    result = {}
    for name, (make, loader, size) in cases.items():
        torch.manual_seed(0)
        checks, steps = [], []
        for _ in range(5):
            Timed.seconds, times = [], StepTimes()
            fit(make(), loader(), size=size, callbacks=[times], max_epochs=1)
            checks.append(Timed.seconds[0])
            steps.append(statistics.median(times.seconds[1:]))
        check, step = statistics.median(checks), statistics.median(steps)
        result[name] = {"check_ms": check * 1e3, "step_ms": step * 1e3, "steps": check / step}
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "splittability.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_unified"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    sys.modules["lightning_unified.training.loop"].SplittabilityCheck = Timed
    result = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "modules": [kind.__name__ for kind in EXPECTED],
        "seeds": options.seeds,
        "cost": cost(),
        "judged": judged(seeds=options.seeds),
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
