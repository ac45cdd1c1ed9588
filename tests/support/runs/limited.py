"""Train under a real RLIMIT_AS in which the whole batch does not fit.

Plain Lightning trains in a fork first, then the strategy `unified`.
"""

import json
import logging
import os
import resource
import warnings

import lightning as L
import torch

import lightning_unified  # noqa: F401  registers "unified"

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MIB = 2**20


class Wide(L.LightningModule):
    """A module with about 6 MiB of activations per row, and 0.5 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 64)

    def training_step(self, batch, batch_idx):
        hidden = self.lift(batch)
        for _ in range(3):
            hidden = torch.tanh(hidden)
        loss = (self.drop(hidden) - batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def train(strategy: str) -> L.Trainer:
    torch.manual_seed(0)
    rows = torch.randn(128, 384, 64)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + 160 * MIB,) * 2)
    trainer.fit(Wide(), torch.utils.data.DataLoader(rows, batch_size=32))
    return trainer


def death_of(strategy: str) -> str | None:
    """Run a fit in its own process; return its error, or None if it ends well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(strategy)
        except Exception as error:
            os.write(writing, f"{type(error).__name__}: {error}"[:4096].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as written:
        words = written.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return words or (None if status == 0 else f"exit status {status}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain = death_of("auto")
    trainer = train("unified")
    strategy = trainer.strategy
    print(
        json.dumps(
            {
                "plain": plain,
                "steps": trainer.global_step,
                "recoveries": strategy.recoveries,
                "micro_batch_size": strategy.micro_batch_size,
                "effective_batch_size": strategy.effective_batch_size,
            }
        )
    )
