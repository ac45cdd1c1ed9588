"""The base of the campaigns' modules: it counts by gradient how often each row took part.

The count stands beside the module's loss and leaves it unchanged.
"""

from weakref import WeakKeyDictionary

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from benchmarks.recovery.campaign.recipes import Recipe
from lightning_unified import MicroBatchRules
from lightning_unified.nn.cuda_graphs.contexts import are_eager

__all__ = ["CLASSES", "WIDTH", "Counted", "Seen"]

WIDTH, CLASSES = 6, 4
# Beside the modules: the strategy puts together what micro-batches append to a module's own lists, and undoes what checks append.
_PARTS: "WeakKeyDictionary[Counted, list[int]]" = WeakKeyDictionary()


class Seen(Metric):
    """How often `training_step` received each row.

    Saved with the weights, so that a resumed run continues the count.
    """

    full_state_update = False

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(rows, dtype=torch.int64), dist_reduce_fx="sum", persistent=True)

    def update(self, ids: Tensor) -> None:
        self.counts += torch.bincount(ids, minlength=len(self.counts))

    def compute(self) -> Tensor:
        return self.counts


class Counted(L.LightningModule):
    """A module with a parameter that has one entry a row, learning rate 0 and value 0.

    The loss gets the row's entry beside each of its terms: that adds nothing to the loss, and the entry's gradient says by how much the
    row counted in this optimizer step. A row that was taken twice counts double, one that was lost counts nothing.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.net = self.build_net()
        self.tally = nn.Parameter(torch.zeros(recipe.rows))
        self.seen = Seen(recipe.rows)
        _PARTS[self] = []
        self.prepares_itself = False  # plain Lightning does not know the rule `prepare`

    @property
    def parts(self) -> list[int]:
        """Rows of each `training_step`, also of failed attempts, but not of exactness checks."""
        return _PARTS[self]

    def build_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def configure_micro_batches(self, stage: str) -> MicroBatchRules:
        return MicroBatchRules()

    def terms(self, batch: dict) -> Tensor:
        """Return how many loss terms each row has."""
        return torch.ones(len(batch["id"]), dtype=self.tally.dtype)

    def total(self, batch: dict) -> Tensor:
        """Return by how many terms the loss of this part is divided."""
        return self.terms(batch).sum()

    def loss(self, batch: dict) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: dict, batch_idx: int):
        prepare = self.configure_micro_batches("fit").prepare
        if self.prepares_itself and prepare is not None:
            with torch.no_grad():
                batch = prepare(batch)
        if not are_eager():  # a check runs calls eagerly, and may come between two micro-batches
            self.parts.append(len(batch["id"]))
        self.seen.update(batch["id"])
        loss = self.loss(batch)
        loss = loss + (self.tally[batch["id"]] * self.terms(batch)).sum() / self.total(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rows", float(len(batch["id"])), on_epoch=True, reduce_fx="sum")
        self.measure(batch)
        return {"loss": loss, "ids": batch["id"], "names": batch["name"]}

    def measure(self, batch: dict) -> None:
        """Log what only some modules log."""

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=int(self.terms(batch).sum()))

    def configure_optimizers(self):
        recipe, name = self.recipe, self.recipe.optimizer.split()
        parameters = list(self.net.parameters())
        half = len(parameters) // 2
        groups = [
            {"params": parameters[:half], "lr": 0.05},
            {"params": parameters[half:], "lr": 0.02},
            {"params": [self.tally], "lr": 0.0},
        ]
        kinds = {
            "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(groups, **dict.fromkeys(name[1:], True)),
            "adagrad": lambda: torch.optim.Adagrad(groups),
        }
        optimizer = kinds[name[0]]()
        if recipe.schedule == "none":
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 if recipe.schedule == "step" else 1, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": recipe.schedule}}
