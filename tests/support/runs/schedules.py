"""Fits of many batches that count their exactness checks."""

import torch
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from tests.support.modules.plain import Rows, fit


class Checks:
    """The checks of a run.

    For each check: the step before whose update it ran, and the rows and the split of each trial.
    """

    def __init__(self):
        self.steps, self.rows, self.splits = [], [], []


def batches(*, number=40, size=8, change=lambda batch, row: {}):
    """Return a loader of batches of one kind, with the exceptions that `change` makes.

    `change` gets a batch and a row.
    """
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(number * size):
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        rows.append({"x": x, "y": index % 4, **change(index // size, index % size)})
    return DataLoader(Rows(rows), batch_size=size)


def run(kind, loader, *, strategy=None, **options):
    torch.manual_seed(0)
    module = kind().double()
    strategy = strategy or UnifiedStrategy(micro_batch_size=3)
    _, trainer = fit(module, loader, strategy=strategy, max_epochs=options.pop("max_epochs", 1), **options)
    return module, trainer


def found(trainer):
    return trainer.strategy.plan.reasons["loss_weight"]
