"""Cost of the exactness check: GearHead-34M over 200 split steps.

Steps have two, five and eight micro-batches.

The cost is the seconds of all checks of a fit, and of looking at each batch for whether it is to be checked, over the seconds of the
whole fit, with a wait for the device around each. Every fit is made in a process of its own, after a fit of one step without checks:
that step loads the kernels that training loads in any case, so the first check pays for those that it alone needs. The kernels that
Triton compiles once for each machine are compiled before. Rows are ragged, so that batches with new lengths are checked as they come. The
bars: at most 3 % at five micro-batches and more, at most 8 % at two.

Usage: python -m benchmarks.exactness.check_cost [8x4 ...] [--device cuda] [--steps 200] [--positions 512]
       (writes benchmarks/exactness/check_cost.json; about 5 minutes on an H100)
"""

import argparse
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.records import markdown, origin, prepare, write
from lightning_unified import UnifiedStrategy
from lightning_unified.models.gearhead import GearHead
from lightning_unified.step.exactness.check import ExactnessCheck

RESULTS = Path(__file__).with_suffix(".json")
SETTINGS = [(8, 4), (5, 8), (5, 32), (5, 64), (2, 16), (2, 32)]  # micro-batches a step, and the rows of each
BARS = {2: 0.08, 5: 0.03, 8: 0.03}


class Ragged(Dataset):
    """Rows of a quarter to all of the positions; every fifth row has a diagnosis."""

    def __init__(self, rows: int, positions: int) -> None:
        self._rows, self._positions = rows, positions

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 32_000, (self._positions,), generator=generator)
        length = int(torch.randint(self._positions // 4, self._positions + 1, (), generator=generator))
        diagnosis = torch.full_like(tokens, -100)
        if index % 5 == 0:
            diagnosis[length - 1] = index % 7
        return {
            "input_ids": tokens,
            "labels": torch.where(torch.arange(self._positions) < length, tokens, -100),
            "error_code_ids": torch.zeros_like(tokens),
            "diagnosis_labels": diagnosis,
        }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Times:
    """Records the seconds of every call of a method of ExactnessCheck.

    It waits for the device before and after the call.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.batches: list[int] = []
        self.seconds: list[float] = []
        plain = getattr(ExactnessCheck, name)

        def timed(check, *args, **kwargs):
            wait(device)
            began = time.perf_counter()
            try:
                return plain(check, *args, **kwargs)
            finally:
                wait(device)
                self.batches.append(check._batches)
                self.seconds.append(time.perf_counter() - began)

        setattr(ExactnessCheck, name, timed)


def fit(
    num_micro_batches: int, rows: int, *, device: str, steps: int, positions: int, precision: Any, check: bool = True
) -> float:
    """Return the seconds of a fit."""
    torch.manual_seed(0)
    module = GearHead(preset="gearhead-34m", positions=max(positions, 512))
    rules = replace(module.configure_micro_batches("fit"), check=check)
    batch_size = num_micro_batches * rows
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        precision=precision,
        strategy=UnifiedStrategy(micro_batch_size=rows, predict=False, micro_batches=rules),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    workers = 4 if device == "cuda" else 0
    loader = DataLoader(Ragged(batch_size * steps, positions), batch_size=batch_size, num_workers=workers)
    began = time.perf_counter()
    trainer.fit(module, loader)
    wait(torch.device(device))
    return time.perf_counter() - began


def measured(num_micro_batches: int, rows: int, *, device: str, steps: int, **options: Any) -> dict[str, Any]:
    """Return the seconds of the fit, of its checks and of its looks at batches.

    This changes ExactnessCheck for the rest of the process.
    """
    prepare("exactness-cost")
    logging.getLogger("lightning_unified").setLevel(logging.ERROR)
    fit(num_micro_batches, rows, device=device, steps=1, check=False, **options)
    checks, verdicts = (Times(name, torch.device(device)) for name in ("_check", "verdict"))
    seconds = fit(num_micro_batches, rows, device=device, steps=steps, **options)
    looks = [
        took for batch, took in zip(verdicts.batches, verdicts.seconds, strict=True) if batch not in checks.batches
    ]
    return {
        "micro-batches": num_micro_batches,
        "rows of each": rows,
        "seconds": round(seconds, 3),
        "checks": len(checks.seconds),
        "seconds of checks": round(sum(checks.seconds), 3),
        "milliseconds of the first look": round(1e3 * (verdicts.seconds[0] - checks.seconds[0]), 1),
        "milliseconds a look": round(1e3 * median(looks), 2),
        "share": round(sum(verdicts.seconds) / seconds, 4),
        "bar": BARS[num_micro_batches],
        "batches checked": checks.batches,
        "milliseconds of each": [round(1e3 * duration, 1) for duration in checks.seconds],
    }


def alone(*setting: int, **options: Any) -> dict[str, Any]:
    """Return what `measured` does, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, *setting, **options).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=["x".join(map(str, setting)) for setting in SETTINGS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    setting = {
        "device": options.device,
        "steps": options.steps,
        "positions": options.positions,
        "precision": options.precision,
    }
    accelerator = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    record = {**origin("python -m benchmarks.exactness.check_cost"), "accelerator": accelerator, **setting}
    rows: list[dict[str, Any]] = []
    alone(2, 8, **{**setting, "steps": 8})  # compiles Triton's kernels
    for sizes in options.settings:
        rows.append(alone(*map(int, sizes.split("x")), **setting))
        print(rows[-1], flush=True)
        write({**record, "runs": rows}, options.output)  # after each, so that a run that is cut off keeps the others
    shown = {
        f"{row['micro-batches']} of {row['rows of each']} rows": {
            name: row[name]
            for name in (
                "seconds",
                "checks",
                "seconds of checks",
                "milliseconds a look",
                "share",
                "bar",
            )
        }
        for row in rows
    }
    print(markdown(shown, first="a step of"))


if __name__ == "__main__":
    main()
