"""A small module with blocks, for plans of several devices."""

import lightning as L
import torch

ROWS, WIDTH, BLOCKS = 16, 64, 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Linear(WIDTH, 31)  # its rows are no multiple of the ranks
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return self.table(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, foreach=True)
