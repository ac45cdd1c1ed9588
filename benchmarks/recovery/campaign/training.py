"""One fit of a recipe in this process, and the ledger of its batches."""

import json
import os
import random
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.plugins import MixedPrecision

from benchmarks.recovery.campaign.counted import Counted
from benchmarks.recovery.campaign.modules import Batches, build
from benchmarks.recovery.campaign.recipes import Recipe
from lightning_unified import UnifiedStrategy
from lightning_unified.callbacks import GracefulInterrupt, GradientHealth, MemoryMonitor, RunCheckpoint
from lightning_unified.step.recovery import sizes

__all__ = ["FINAL", "STARTED", "Fit", "Ledger", "read_ledger", "train", "write_past_limit"]

STARTED, LEDGER, FINAL = "started", "ledger.jsonl", "final.pt"


@dataclass(kw_only=True)
class Fit:
    """How a recipe is run this time.

    Attributes:
        recipe: What is trained.
        folder: Where checkpoints, ledger and final state go.
        callbacks: What disturbs it.
        replay: Sizes of each batch's micro-batches, by its number from 0; None leaves them to the strategy.
        plain: Whole batches, by Lightning's own strategy, or, where it has none of the recipe's kind of window, by ours.
        resume: The checkpoint to go on from.
        strategy: Further arguments of `UnifiedStrategy`.
    """

    recipe: Recipe
    folder: Path
    callbacks: tuple[L.Callback, ...] = ()
    replay: dict[int, list[int]] | None = None
    plain: bool = False
    resume: Path | None = None
    strategy: dict[str, Any] = field(default_factory=dict)


class Ledger(L.Callback):
    """Writes one unbuffered line at the end of each batch.

    The ledger of a killed process is then complete.

    A line has the batch's number from 0 over all epochs, the sizes of its micro-batches, its rows, its loss, the optimizer steps
    so far, when it ended, and how often it was repeated; a batch that stepped also has by how much each row counted in the step.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._started = folder / STARTED
        self._counts: list[float] | None = None
        self._recovered = 0
        self.has_written = False

    def on_train_start(self, trainer, pl_module):
        self._started.touch()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradient, scaler = pl_module.tally.grad, getattr(trainer.precision_plugin, "scaler", None)
        if gradient is None:
            self._counts = None
            return
        # an optimizer that unscales by itself has not done so yet
        scale = scaler.get_scale() if scaler and getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0
        self._counts = (gradient.double() / scale).tolist()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        parts: list[int] = []
        for rows in reversed(pl_module.parts):  # the last attempt's are the last, and come to the batch's rows
            if sum(parts) == len(batch["id"]):
                break
            parts.insert(0, rows)
        line = {
            "batch": trainer.fit_loop.total_batch_idx,
            "sizes": parts,
            "rows": batch["id"].tolist(),
            "step": trainer.global_step,
            "loss": float(outputs["loss"]).hex() if outputs else None,
            "counts": self._counts,
            "at": time.time(),
            "recovered": getattr(trainer.strategy, "recoveries", 0) - self._recovered,
        }
        self._recovered = getattr(trainer.strategy, "recoveries", 0)
        self._counts, self.has_written = None, True
        pl_module.parts.clear()
        write_past_limit(self._file, (json.dumps(line) + "\n").encode())


def write_past_limit(file: int, text: bytes) -> None:
    """Write what this campaign must know of a run whose disk it has filled."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    os.write(file, text)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read_ledger(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the lines by batch number; the newest if a resume ran a batch again."""
    path = folder / LEDGER
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["batch"]: line for line in lines}


class Replay(L.Callback):
    """The undisturbed twin: splits each batch as another run's ledger says."""

    def __init__(self, sizes: dict[int, list[int]]) -> None:
        self._sizes = sizes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        rows, sizes = self._sizes[trainer.fit_loop.total_batch_idx], trainer.strategy.sizes
        sizes.max_micro_batch_size = max(rows)
        sizes.micro_batches = lambda _shape: rows


class Half(MixedPrecision):
    """float16 with a live scaler on a CPU.

    The scale grows every second step, so each checkpoint holds another value.
    """

    def __init__(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        super().__init__("16-mixed", device="cpu", scaler=scaler)


def train(fit: Fit) -> None:
    """Run one fit to its end, and write its whole final state into its folder."""
    recipe, folder = fit.recipe, fit.folder
    folder.mkdir(parents=True, exist_ok=True)
    module = build(recipe)
    module.prepares_itself = fit.plain and recipe.window_mean == "batches"
    trainer = _trainer(fit)
    random.seed(recipe.seed)
    np.random.seed(recipe.seed % 2**32)  # noqa: NPY002  # the global stream is what a run must not disturb
    torch.manual_seed(recipe.seed + 1 if fit.resume is None else 99)  # a resumed run must not feel it
    loaders = Batches(recipe), Batches(recipe, training=False)
    trainer.fit(module, *loaders, ckpt_path=str(fit.resume) if fit.resume else None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    partial = folder / f"{FINAL}.new"
    torch.save(_state(trainer, module), partial)
    partial.rename(folder / FINAL)


def _trainer(fit: Fit) -> L.Trainer:
    recipe, folder = fit.recipe, fit.folder
    half = recipe.precision == "16-mixed"
    checkpoints = RunCheckpoint(folder / "checkpoints", every_n_steps=recipe.save_every, keep=2)
    callbacks: list[L.Callback] = [*fit.callbacks, Ledger(folder), GracefulInterrupt(), checkpoints]
    if recipe.watched:
        callbacks += [GradientHealth(check_every=3), MemoryMonitor(every_n_batches=1)]
    strategy: str | UnifiedStrategy = "auto"
    if not fit.plain:
        sizes._PATIENCE = recipe.patience
        options = {
            "micro_batch_size": recipe.micro,
            "optimizer_rollback": recipe.rollback,
            "batch_norm": "micro",
            "recompute": recipe.recompute if fit.replay is None else False,
            "window_mean": recipe.window_mean,
            "remember": str(folder / "sizes.json") if recipe.remember else None,
        }
        strategy = UnifiedStrategy(**{**options, **fit.strategy})
    elif recipe.window_mean == "terms":
        strategy = UnifiedStrategy(window_mean="terms")
    if fit.replay is not None:
        callbacks.append(Replay(fit.replay))
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision=None if half else recipe.precision,
        plugins=[Half()] if half else None,
        max_epochs=recipe.epochs,
        max_steps=recipe.max_steps,
        accumulate_grad_batches=recipe.window,
        gradient_clip_val=recipe.clip,
        val_check_interval=recipe.validate_every,
        check_val_every_n_epoch=None if recipe.validate_every else 1,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )


def _state(trainer: L.Trainer, module: Counted) -> dict[str, Any]:
    """Return a run's final state: checkpoint contents, random states and logs."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "steps": trainer.global_step,
        "batches": trainer.fit_loop.total_batch_idx + 1,
        "trained": next(callback for callback in trainer.callbacks if isinstance(callback, Ledger)).has_written,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "buffers": {name: b.detach().clone() for name, b in module.named_buffers()},
        "seen": module.seen.counts.clone(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scaler": scaler.state_dict() if scaler is not None else {},
        "random": torch.get_rng_state(),
        "python": random.random(),
        "logged": {name: float(v) for name, v in trainer.callback_metrics.items() if not name.startswith("memory")},
        "recoveries": getattr(trainer.strategy, "recoveries", 0),
        "events": list(getattr(trainer.strategy, "events", [])),
    }
