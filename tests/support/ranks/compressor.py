"""A compressor with texts and random numbers that depend on the row only, and its training.

A row is therefore the same on any rank.
"""

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_unified import UnifiedDDPStrategy
from lightning_unified.models.compressor import Compressor
from tests.support.ranks.runs import quiet, rank

ROWS, LENGTH, MASKS = 24, 12, 2


def row(number: int) -> dict[str, torch.Tensor]:
    """Return one text with its random numbers.

    The rows 2n and 2n + 1 have one length, so that two ranks score the same number of tokens.
    """
    generator = torch.Generator().manual_seed(number)
    length = LENGTH - number // 2 % 5
    mask = torch.arange(LENGTH) < length
    return {
        "input_ids": torch.randint(9, 300, (LENGTH,), generator=generator) * mask,
        "mask": mask,
        "noise": torch.rand(MASKS, LENGTH, generator=generator),
        "shifts": torch.rand((), generator=generator) * 4 - 2,
        "starts": torch.tensor(number // 2 % 4),
    }


class OwnNumbers(Compressor):
    """Draws no random numbers: they come with the batch."""

    def __init__(self, *, ranks: int, **arguments: Any) -> None:
        super().__init__(preset="compressor-tiny", masks=MASKS, schedule="constant", warmup_steps=1, **arguments)
        self.ranks = ranks

    def prepare_batch(self, batch):
        prepared = super().prepare_batch({name: batch[name] for name in ("input_ids", "mask")})
        return {**prepared, **batch, "total_language": batch["mask"].sum() - batch["starts"].sum()}

    def training_step(self, batch, batch_idx=0):
        return super().training_step(batch if "total_texts" in batch else self.prepare_batch(batch), batch_idx)

    def train_dataloader(self):
        own = range(rank() if self.ranks > 1 else 0, ROWS, self.ranks)
        return DataLoader([row(number) for number in own], batch_size=8 // self.ranks)

    def val_dataloader(self):
        return self.train_dataloader()


def trained(strategy: Any, *, ranks: int, objective: str) -> dict[str, Any]:
    """Return weights, price and figures after three batches of eight rows over all ranks."""
    torch.manual_seed(7)
    module = OwnNumbers(ranks=ranks, objective=objective).double()
    first_price = module.price.value.clone()
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, precision="64-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        num_sanity_val_steps=0, gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module)
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in module.parameters()]),
        "price": module.price.value,
        "first_price": first_price,
        "figures": {
            name: float(trainer.callback_metrics[name]) for name in ("train/keep_ratio", "train/spread", "val/loss")
        },
    }


def on_two() -> dict[str, dict[str, Any]]:
    """Return fits on two ranks, whole and split, under both objectives."""
    quiet()
    return {
        f"{objective}, {name}": trained(UnifiedDDPStrategy(predict=False, **options), ranks=2, objective=objective)
        for objective in ("relaxed", "reinforce")
        for name, options in (("whole", {}), ("split", {"micro_batch_size": 3}))
    }
