"""The fits that GPU faults are injected into, and the time of their checks.

`faults.py` writes both into its record. Times are measured on the CPU without a simulation: nothing here has run on a Mac.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from typing_extensions import override

from lightning_unified import UnifiedStrategy
from lightning_unified.step.loop.fault_checked import FaultCheckedOptimization

ROWS, BATCHES, WIDTH = 8, 3, 16


class Layers(L.LightningModule):
    """Layers with normalisation and dropout, trained by Adam."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)) for _ in range(layers)]
        self.net = nn.Sequential(*blocks)

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch.roll(1, -1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def trainer_of(folder: Path, strategy: UnifiedStrategy, *callbacks: L.Callback, steps: int = BATCHES) -> L.Trainer:
    """Return a Trainer that shows nothing."""
    return L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )


def data(batches: int = BATCHES) -> Any:
    """Return the same rows in every run."""
    rows: Any = torch.randn(ROWS * batches, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(rows, batch_size=ROWS)


class OnTheCPU(UnifiedStrategy):
    """Checks the steps of a CPU as those of a Mac, with the watch over file descriptor 2."""

    @override
    def _optimization(self, trainer: L.Trainer) -> FaultCheckedOptimization:
        self.first_step = None
        return FaultCheckedOptimization(trainer, self.policy)


class Timed(L.Callback):
    """Times the checks of each step by themselves.

    By the clock, which is cheap to read; the median over steps leaves out those in which another program ran. The timers count as theirs. What a hook costs before it calls the canary does not.
    """

    def __init__(self, *, warm: int) -> None:
        self._warm, self._checks_s, self._depth = warm, 0.0, 0
        self.checks: list[float] = []
        self.steps: list[float] = []

    def on_train_start(self, trainer, pl_module):
        watch = trainer.fit_loop.epoch_loop.automatic_optimization._faults
        watch.look, watch.canary.mark = self._timed(watch.look), self._timed(watch.canary.mark)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._checks_s, self._began = 0.0, time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx >= self._warm:
            self.checks.append(self._checks_s)
            self.steps.append(time.perf_counter() - self._began)

    def _timed(self, function: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            began, self._depth = time.perf_counter(), self._depth + 1
            try:
                return function()
            finally:
                self._depth -= 1
                if not self._depth:  # a look makes a mark of its own
                    self._checks_s += time.perf_counter() - began

        return timed


def overhead(folder: Path, layers: int, num_micro_batches: int, steps: int) -> dict[str, Any]:
    """Return the time that the checks take in each step, in milliseconds."""
    torch.mps.synchronize = lambda: None  # there is nothing to wait for on a CPU
    timed = Timed(warm=20)
    strategy = OnTheCPU(predict=False, check_split=False, micro_batch_size=ROWS // num_micro_batches)
    torch.manual_seed(0)
    trainer_of(folder, strategy, timed, steps=steps + 20).fit(Layers(layers), data(steps + 20))
    return {
        "blocks": layers,
        "micro-batches": num_micro_batches,
        "step_ms": 1e3 * statistics.median(timed.steps),
        "checks_ms": 1e3 * statistics.median(timed.checks),
        "checks_lowest_tenth_ms": 1e3 * statistics.quantiles(timed.checks, n=10)[0],
    }


def costs_of(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Return the cost in fits of several sizes."""
    return [
        overhead(folder, layers, num_micro_batches, steps) for layers, num_micro_batches in ((1, 1), (20, 1), (20, 2))
    ]
