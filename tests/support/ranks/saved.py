"""Runs of `unified_fsdp` that save, are killed while they save, and go on."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemWriter

from lightning_unified import RunCheckpoint, UnifiedFSDPStrategy
from lightning_unified.step.sharding import rows, saving
from tests.support.ranks.modules import TEXT
from tests.support.ranks.sharded import FEW, ROWS, Fails, local_rank, trained

HOLDS = {"parameters": {"hold": "parameters"}, "shards": {"hold": "shards"}}


def run_checkpoint(folder: str, *, every: int = 4) -> RunCheckpoint:
    return RunCheckpoint(folder, every_n_steps=every, monitor=None)


def resumed(size: int, folder: str, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a run with a failure, and the same run stopped in the middle and resumed."""

    def run(name: str, *callbacks: L.Callback, **options: Any) -> dict[str, Any]:
        strategy = UnifiedFSDPStrategy(**arguments)
        own = run_checkpoint(f"{folder}/{name}")
        options |= {"module": {"drop": 0.3, "rows": FEW}}
        return trained(strategy, own, *callbacks, ranks=size, rank=local_rank(), enable_checkpointing=True, **options)

    straight = run("straight", Fails("backward", batch=1), max_epochs=2)
    run("stopped", Fails("backward", batch=1), max_epochs=1)
    return {"straight": straight, "resumed": run("resumed", ckpt_path=f"{folder}/stopped/last.ckpt", max_epochs=2)}


def stopped(size: int, folder: str, *, strategy: dict[str, Any] | None = None, rows: int = ROWS) -> dict[str, Any]:
    """Return a run that stops after an epoch, with a checkpoint."""
    own, made = run_checkpoint(folder), UnifiedFSDPStrategy(**(strategy or {}))
    options: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": True, "module": {"rows": rows}}
    return trained(made, own, ranks=size, rank=local_rank(), **options)


def stopped_as_file(size: int, folder: str, *, rows: int = ROWS) -> dict[str, Any]:
    return stopped(size, folder, strategy={"save_distributed_checkpoint": False}, rows=rows)


def continued(size: int, checkpoint: str, hold: str = "parameters") -> dict[str, Any]:
    return trained(UnifiedFSDPStrategy(**HOLDS[hold]), ranks=size, rank=local_rank(), ckpt_path=checkpoint)


class SavesBoth(L.Callback):
    """Saves the same state as a folder and as a file, inside a validation and at the end."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_validation_end(self, trainer, module):
        self._save(trainer, "validated")

    def on_train_end(self, trainer, module):
        self._save(trainer, "ended")

    def _save(self, trainer: L.Trainer, name: str) -> None:
        for form, saves_folders in (("folder", True), ("file", False)):
            trainer.strategy._saves_folders = saves_folders
            trainer.save_checkpoint(f"{self.folder}/{name}-{form}.ckpt")


def both_forms(folder: str, hold: str) -> dict[str, Any]:
    strategy = UnifiedFSDPStrategy(**HOLDS[hold])
    return trained(strategy, SavesBoth(folder), ranks=2, rank=local_rank(), max_epochs=1)


class Strikes(L.Callback):
    """Lets the second rank fail in a save, after its bytes are written."""

    def __init__(self, kind: str, *, saves: tuple[int, ...]) -> None:
        self.kind, self.saves, self.seen = kind, saves, 0

    def on_fit_start(self, trainer, module):
        write = FileSystemWriter.write_data

        def failing(writer: FileSystemWriter, plan: Any, planner: Any) -> Any:
            self.seen += 1
            done = write(writer, plan, planner)
            if local_rank() == 1 and self.seen in self.saves:
                self._strike()
            return done

        saving.FileSystemWriter.write_data = failing

    def _strike(self) -> None:
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device") if self.kind == "full" else RuntimeError(TEXT)


class SavesLast(L.Callback):
    """Saves `last.ckpt` after each epoch."""

    def __init__(self, folder: str) -> None:
        self.path = f"{folder}/last.ckpt"

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


def struck(folder: str, kind: str, saves: tuple[int, ...]) -> dict[str, Any]:
    """Return two epochs with a save each, in which the second rank fails in the given ones."""
    callbacks = (SavesLast(folder), Strikes(kind, saves=saves))
    return trained(UnifiedFSDPStrategy(), *callbacks, ranks=2, rank=local_rank())


class KilledBetween(L.Callback):
    """Kills the first rank while it replaces a folder, after the old one has lost its name."""

    def __init__(self) -> None:
        self.publish = saving.publish

    def on_fit_start(self, trainer, module):
        def publish(unnamed: Path, target: Path) -> None:
            if target.exists():
                target.rename(target.with_name(f".{target.name}.{os.getpid()}.old.partial"))
                os.kill(os.getpid(), signal.SIGKILL)
            self.publish(unnamed, target)

        saving.publish = publish


def killed_between(folder: str) -> dict[str, Any]:
    return trained(UnifiedFSDPStrategy(), SavesLast(folder), KilledBetween(), ranks=2, rank=local_rank())


def with_model_checkpoint(folder: str) -> dict[str, Any]:
    """Return a run with Lightning's callback, which keeps the best and replaces `last.ckpt`."""
    own = ModelCheckpoint(folder, filename="{step}", monitor="val", save_top_k=1, save_last=True)
    fits = trained(UnifiedFSDPStrategy(), own, ranks=2, rank=local_rank(), enable_checkpointing=True, max_epochs=3)
    return {**fits, "best": own.best_model_path}


def saves_a_file_through(phase: str, folder: str) -> dict[str, Any]:
    """Return a run of six batches whose second rank runs out of memory while state is gathered."""
    calls = []
    memory = rows._memory

    def failing(*args, **kwargs):
        calls.append(1)
        if local_rank() == 1 and len(calls) <= (1 if phase == "once" else 3):
            raise RuntimeError(TEXT)
        return memory(*args, **kwargs)

    rows._memory = failing
    try:
        return {**stopped_as_file(2, folder, rows=44), "saved": sorted(os.listdir(folder))}
    finally:
        rows._memory = memory


def evaluated(checkpoint: str, hold: str) -> dict[str, Any]:
    """Return the loss of a test that begins with a checkpoint, in a module of other weights."""
    from tests.support.ranks.sharded import Deep

    torch.manual_seed(99)
    module = Deep(ranks=2, rank=local_rank()).double()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=UnifiedFSDPStrategy(**HOLDS[hold]), logger=False, precision="64-true",
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    return {"test": trainer.test(module, ckpt_path=checkpoint, verbose=False)[0]["test"]}
