"""Run as a program: trains under a real RLIMIT_AS in which the whole batch does not fit. Usage: limited.py auto|unified"""

import json
import logging
import resource
import sys
import warnings

import lightning as L
import torch

import lightning_unified  # noqa: F401  registers "unified"

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MIB = 2**20


class Wide(L.LightningModule):
    """About 6 MiB of activations a row, 0.5 MiB of weights: rows decide whether it fits."""

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = torch.randn(128, 384, 64)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=sys.argv[1],
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + 160 * MIB,) * 2)
    trainer.fit(Wide(), torch.utils.data.DataLoader(rows, batch_size=32))
    strategy = trainer.strategy
    print(
        json.dumps(
            {
                "steps": trainer.global_step,
                "loss": float(trainer.callback_metrics["loss"]),
                "recoveries": getattr(strategy, "recoveries", None),
                "micro_batch_size": getattr(strategy, "micro_batch_size", None),
                "effective_batch_size": getattr(strategy, "effective_batch_size", None),
            }
        )
    )
