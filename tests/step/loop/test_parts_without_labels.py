"""Parameters that only rows without labels use have gradients of zero.

So optimizers update them, as in the whole batch.
"""

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import UnifiedStrategy
from tests.support.lanes import first_cells
from tests.support.modules.plain import fit, weights

ROWS, CLASSES, IDS = 8, 4, 20
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4 * ROWS, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, CLASSES, (4 * ROWS,), generator=GENERATOR)
USED = torch.ones(4 * ROWS, dtype=torch.bool)
IDENTIFIERS = torch.randint(0, IDS, (4 * ROWS,), generator=GENERATOR)
for begin in range(
    ROWS, 4 * ROWS, ROWS
):  # later batches: only rows of the last micro-batch use the part, without a label
    USED[begin : begin + 4], Y[begin + 4 : begin + ROWS] = False, -100


class Part(L.LightningModule):
    """A layer that some rows skip, or an embedding with sparse gradients."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.optimizer, self.net = optimizer, nn.Linear(6, CLASSES)
        sparse = optimizer is torch.optim.SparseAdam
        self.part = nn.Embedding(IDS, CLASSES, sparse=True) if sparse else nn.Linear(6, CLASSES)

    def training_step(self, batch, batch_idx):
        x, y, used, ids = batch
        logits = self.net(x)
        if isinstance(self.part, nn.Embedding):
            logits = logits + self.part(ids)
        elif used.any():
            logits = logits.index_add(0, used.nonzero()[:, 0], self.part(x[used]))
        return cross_entropy(logits, y)

    def configure_optimizers(self):
        if self.optimizer is torch.optim.SparseAdam:
            return torch.optim.SparseAdam(self.part.parameters(), 0.05)
        return self.optimizer(self.parameters(), 0.1)


def trained(strategy, optimizer):
    module = Part(optimizer).double()
    fit(module, DataLoader(TensorDataset(X, Y, USED, IDENTIFIERS), batch_size=ROWS), strategy=strategy, max_epochs=1)
    return weights(module)


@first_cells(1, "optimizer", [torch.optim.AdamW, torch.optim.SparseAdam])
def test_weights_are_those_of_whole_batches(optimizer):
    plain, ours = trained("auto", optimizer), trained(UnifiedStrategy(micro_batch_size=4), optimizer)

    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
