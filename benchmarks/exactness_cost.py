"""What the exactness check costs a run: GearHead-34M over 200 split steps, at two and at five micro-batches a step.

The seconds of all checks of a fit, with a wait for the device around each, over the seconds of the whole fit without its first step. Rows are
ragged, so that batches with new lengths are checked as they come. The bars: at most 3 % at five micro-batches and more, at most 8 % at two.

Usage: python benchmarks/exactness_cost.py [--device cuda] [--steps 200] [--positions 512]
       (writes benchmarks/results/exactness_cost.json; about 2 minutes on an H100)
"""

import argparse
import logging
import time
from pathlib import Path

import lightning as L
import torch
from campaign.records import markdown, origin, prepare, write
from torch.utils.data import DataLoader, Dataset

from lightning_unified import UnifiedStrategy
from lightning_unified.models.gearhead import GearHead
from lightning_unified.training.exactness.check import ExactnessCheck

RESULTS = Path(__file__).parent / "results" / "exactness_cost.json"
BARS = {2: 0.08, 5: 0.03}
ROWS = 160  # of 512 positions: a micro-batch of 32 rows is one that an accelerator is busy with


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


class Clock(L.Callback):
    """The seconds from the end of the first step to the end of the last."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in (1, trainer.max_steps):
            wait(trainer.strategy.root_device)
            setattr(self, "began" if trainer.global_step == 1 else "ended", time.perf_counter())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured(parts: int, *, device: str, steps: int, positions: int, precision: str) -> dict[str, float]:
    """Return the seconds of the fit and of its checks."""
    torch.manual_seed(0)
    module = GearHead(preset="gearhead-34m", positions=max(positions, 512))
    strategy = UnifiedStrategy(micro_batch_size=ROWS // parts, predict=False)
    checks: list[tuple[int, float]] = []
    plain = ExactnessCheck._check

    def timed(self, *args, **kwargs):
        wait(strategy.root_device)
        began = time.perf_counter()
        try:
            return plain(self, *args, **kwargs)
        finally:
            wait(strategy.root_device)
            checks.append((self._batches, time.perf_counter() - began))

    ExactnessCheck._check = timed
    clock = Clock()
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        precision=precision,
        strategy=strategy,
        max_steps=steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(
            module,
            DataLoader(Ragged(ROWS * steps, positions), batch_size=ROWS, num_workers=4 if device == "cuda" else 0),
        )
    finally:
        ExactnessCheck._check = plain
    seconds = clock.ended - clock.began
    later = sum(duration for batch, duration in checks if batch > 1)
    first = sum(duration for batch, duration in checks if batch == 1)
    return {
        "micro-batches": parts,
        "seconds": seconds + first,
        "checks": len(checks),
        "seconds of checks": first + later,
        "share": (first + later) / (seconds + first),
        "bar": BARS[parts],
        "batches checked": [batch for batch, _ in checks],
        "milliseconds of each": [round(1e3 * duration, 1) for _, duration in checks],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    prepare("exactness-cost")
    logging.getLogger("lightning_unified").setLevel(logging.ERROR)
    setting = {
        "device": options.device,
        "steps": options.steps,
        "positions": options.positions,
        "precision": options.precision,
    }
    rows = [measured(parts, **setting) for parts in (5, 2)]
    shown = {
        f"{row['micro-batches']} micro-batches": {
            name: row[name] for name in ("seconds", "checks", "seconds of checks", "share", "bar")
        }
        for row in rows
    }
    print(markdown(shown, first="a step of"))
    for row in rows:
        print(row["micro-batches"], row["batches checked"], row["milliseconds of each"])
    accelerator = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    record = {
        **origin("python benchmarks/exactness_cost.py"),
        "accelerator": accelerator,
        **setting,
        "rows": ROWS,
        "runs": rows,
    }
    write(record, options.output)


if __name__ == "__main__":
    main()
