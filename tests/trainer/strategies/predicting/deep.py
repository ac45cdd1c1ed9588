"""A deep module whose activations exceed its weights, and its fit on a simulated machine."""

import lightning as L
import torch
from torch.utils.data import DataLoader

MIB = 2**20


class Deep(L.LightningModule):
    """Half a MiB of activations a row, in blocks that can be recomputed."""

    def __init__(self, depth=4):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
            for _ in range(depth)
        )

    def training_step(self, batch, batch_idx):
        hidden = batch
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (hidden - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Validates(Deep):
    """Keeps what every block gives of a batch of validation."""

    def validation_step(self, batch, batch_idx):
        kept = [batch]
        for block in self.blocks:
            kept.append(kept[-1] + block(kept[-1]))
        self.log("loss", (kept[-1] - batch).square().mean())


class Batches(torch.utils.data.Dataset):
    """Makes a batch when it is asked for, so that only those in use are there."""

    def __init__(self, rows, lengths):
        self.rows, self.lengths = rows, lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.randn(self.rows, self.lengths[index], 64, generator=torch.Generator().manual_seed(index))


def fit(strategy, *, kind=Deep, lengths=(128, 128), rows=32, validation_rows=None, **options):
    torch.manual_seed(0)
    module = kind()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 1, "enable_checkpointing": False} | options),
    )
    validation = None if validation_rows is None else DataLoader(Batches(validation_rows, lengths), batch_size=None)
    trainer.fit(module, DataLoader(Batches(rows, lengths), batch_size=None), validation)
    return module


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
