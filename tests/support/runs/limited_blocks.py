"""Train blocks whose activations for one row exceed a real RLIMIT_AS.

Usage: limited_blocks.py auto|false
"""

import json
import logging
import resource
import sys
import warnings

import lightning as L
import torch

from lightning_unified import UnifiedStrategy
from tests.support.runs.limited import MIB, address_space

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Block(torch.nn.Module):
    """A block with about 8 MiB of activations per row."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 64)

    def forward(self, x):
        hidden = self.lift(x)
        for _ in range(3):
            hidden = torch.tanh(hidden)
        return x + self.drop(hidden)


class Deep(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(24))

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.blocks:
            x = block(x)
        return (x - batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Deep()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(recompute="auto" if sys.argv[1] == "auto" else False),
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + 160 * MIB,) * 2)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(12, 512, 64), batch_size=4))
    plan = trainer.strategy.plan
    print(
        json.dumps(
            {"steps": trainer.global_step, "rows": plan.micro_batch_size, "recompute": plan.reasons["recompute"]}
        )
    )
