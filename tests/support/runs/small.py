"""A short run with all the state that a resume must restore.

It has dropout, AdamW, a scheduler and a stateful shuffling loader.

Imported by the tests through the `small_run` fixture, and run as a script where a test needs a process of its own:
    python small.py FOLDER [--kill-at N [--signals N] [--signal NAME]] [--accumulate N] [--resume FILE] [--devices N]
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified.callbacks import GracefulInterrupt, RunCheckpoint
from lightning_unified.step.recovery.checkpoint_io import AtomicCheckpointIO

BATCHES = 5


class StatefulLoader:
    """Five batches an epoch, in an order that depends on the epoch.

    The loader remembers its place, as Lightning's protocol asks.
    """

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(BATCHES * 4, 6, generator=generator)
        self.y = torch.randn(BATCHES * 4, 1, generator=generator)
        self.epoch = 0
        self.position = 0
        self.resumed = False

    def __len__(self):
        return BATCHES

    def __iter__(self):
        if self.position >= BATCHES:
            self.epoch, self.position = self.epoch + 1, 0
        elif not self.resumed:
            self.position = 0
        self.resumed = False
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch))
        torch.empty((), dtype=torch.int64).random_()  # as a DataLoader does: making an iterator moves the global stream
        while self.position < BATCHES:
            rows = order[self.position * 4 : self.position * 4 + 4]
            self.position += 1
            yield self.x[rows], self.y[rows]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position, self.resumed = state["epoch"], state["position"], True


class SmallModule(LightningModule):
    def __init__(self, dropout=0.5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.validations = 0

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        torch.rand(3)
        self.log("val/loss", self.loss(batch))

    def on_validation_epoch_end(self):
        self.validations += 1

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StopAfterBatch(Callback):
    """Sets `should_stop` after `batches` batches of this fit, as any callback may."""

    def __init__(self, batches, act=None):
        self.left = batches
        self.act = act

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.left -= 1
        if self.left == 0:
            if self.act is not None:
                self.act(trainer)
            else:
                trainer.should_stop = True
                trainer.limit_val_batches = 0


def validation_loader():
    generator = torch.Generator().manual_seed(8)
    data = TensorDataset(torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator))
    return DataLoader(data, batch_size=4)


def build(folder, *, callbacks=(), **options):
    defaults = {
        "max_steps": 12,
        "max_epochs": -1,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(folder),
    }
    torch.manual_seed(3)
    return SmallModule(), Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(folder, *, callbacks=(), seed=1, resume=None, loader=None, **options):
    """Train and return (module, trainer).

    `seed` sets the global random state when fit begins; a resume must not depend on it.
    """
    module, trainer = build(folder, callbacks=callbacks, **options)
    torch.manual_seed(seed + 1000 * trainer.global_rank)
    trainer.fit(module, loader or StatefulLoader(), validation_loader(), ckpt_path=resume)
    return module, trainer


def same_weights(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


SCRIPT_OPTIONS = {"val_check_interval": 2, "check_val_every_n_epoch": None}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--signals", type=int, default=1)
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--resume")
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_args()

    def kill(trainer):
        if trainer.global_rank == given.devices - 1:
            for _ in range(given.signals):
                os.kill(os.getpid(), signal.Signals[given.signal])

    torch.set_num_threads(1)
    interrupt = GracefulInterrupt(resume_command="python small_run.py --resume")
    callbacks = [StopAfterBatch(given.kill_at, act=kill), interrupt, RunCheckpoint(given.folder)]
    options = {**SCRIPT_OPTIONS, "accumulate_grad_batches": given.accumulate}
    if given.devices > 1:
        options |= {"devices": given.devices, "strategy": "ddp", "plugins": [AtomicCheckpointIO()]}
    module, trainer = fit(given.folder, callbacks=callbacks, resume=given.resume, **options)
    print(f"rank={trainer.global_rank} step={trainer.global_step} validations={module.validations}")
    if trainer.is_global_zero:
        torch.save(module.state_dict(), given.folder / "weights.pt")
    sys.exit(143 if interrupt.signal == signal.SIGTERM else 0)


if __name__ == "__main__":
    main()
