"""Values that several merge rules fit so far are checked once the rules give other results for them."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from tests.support.lanes import first_cells
from tests.support.modules.plain import Rows, fit

FLAGGED = [0, 0, 0, 0, 8, 8, 3, 8, 5, 8]  # rows of each batch


class Flags(L.LightningModule):
    """Logs and returns the number of flagged rows, and whether there are any; the first four batches have none."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.seen, self.validated = [], []

    def flagged(self, batch):
        return (batch["x"][:, 0] > 5).sum().double()

    def training_step(self, batch, batch_idx):
        flagged = self.flagged(batch)
        self.log("count", flagged)
        self.log("any", (flagged > 0).double())
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        return {"loss": loss, "count": flagged, "number": int(flagged)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        logged = self.trainer.callback_metrics
        self.seen.append([float(one) for one in (logged["count"], logged["any"], outputs["count"], outputs["number"])])

    def validation_step(self, batch, batch_idx):
        return {"count": self.flagged(batch)}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.validated.append(float(outputs["count"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    @staticmethod
    def loader():
        generator = torch.Generator().manual_seed(0)
        rows = []
        for flagged in FLAGGED:
            for index in range(8):
                x = torch.randn(6, generator=generator, dtype=torch.float64)
                x[0] = 6.0 if index < flagged else 0.5
                rows.append({"x": x, "y": index % 4})
        return DataLoader(Rows(rows), batch_size=8)


def run(strategy):
    module = Flags().double()
    L.seed_everything(0, verbose=False)
    _, trainer = fit(module, Flags.loader(), strategy=strategy, max_epochs=1)
    trainer.validate(module, Flags.loader(), verbose=False)
    return module


@first_cells(1, "rows", [1, 2, 3])
def test_a_count_that_was_zero_in_all_checks_is_the_whole_batchs(rows):
    strategy = UnifiedStrategy(micro_batch_size=rows, evaluation_micro_batch_size=rows)
    module = run(strategy)

    assert [one[0] for one in module.seen] == FLAGGED
    assert module.seen == run("auto").seen
    assert module.validated == FLAGGED
    assert strategy.events == []
