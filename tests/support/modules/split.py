"""Modules with one loss-weight rule or none, with the loaders of their batches.

The benchmark of the exactness check runs them too.
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, UnifiedStrategy
from tests.support.modules.plain import Rows, fit


def run(kind, *, strategy=None, precision="64-true", **options):
    """Train a module of `kind` in micro-batches.

    Return the module, a callback's records and the strategy.
    """
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    module = kind().to(dtype)
    strategy = strategy or UnifiedStrategy(micro_batch_size=3, batch_norm="micro")
    seen, _ = fit(module, kind.loader(dtype=dtype), strategy=strategy, precision=precision, **options)
    return module, seen, strategy


def found(strategy):
    """Return the strategy's reason for its loss weights."""
    return strategy.plan.reasons["loss_weight"]


class Net(L.LightningModule):
    """A small net over rows of features with a class each; subclasses define the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), self.make_middle(), nn.Tanh(), nn.Linear(16, 4))

    def make_middle(self):
        return nn.Identity()

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net(batch["x"]), batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def loss(self, out, batch):
        return F.cross_entropy(out, batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    @staticmethod
    def loader(seed: int = 0, dtype: torch.dtype = torch.float64):
        generator = torch.Generator().manual_seed(seed)
        rows = [
            {
                "x": torch.randn(6, generator=generator, dtype=dtype),
                "y": row % 4,
                "reward": torch.randn((), generator=generator, dtype=dtype),
            }
            for row in range(24)
        ]
        return DataLoader(Rows(rows), batch_size=8)


class Mean(Net):
    pass


class Dropout(Net):
    def make_middle(self):
        return nn.Dropout(0.5)


class FunctionalDropout(Net):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.5

    def loss(self, out, batch):
        return F.cross_entropy(F.dropout(out, self.dropout, self.training), batch["y"])


class ByItsOwnMode(nn.Module):
    """Dropout that follows this module's own train mode, not its layer's.

    The attention of transformers does the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(x, self.dropout.p if self.training else 0.0)


class AttentionDropout(Net):
    def make_middle(self):
        return ByItsOwnMode()


class Noise(Net):
    def loss(self, out, batch):
        return F.mse_loss(out, torch.randn_like(out))


class BatchNorm(Net):
    def make_middle(self):
        return nn.BatchNorm1d(16)


class Sum(Net):
    def loss(self, out, batch):
        return F.cross_entropy(out, batch["y"], reduction="sum")


class ClassWeighted(Net):
    def loss(self, out, batch):
        return F.cross_entropy(out, batch["y"], weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).to(out))


class Contrastive(Net):
    def loss(self, out, batch):
        out = F.normalize(out, dim=-1)
        return F.cross_entropy(out @ F.normalize(batch["x"][:, :4], dim=-1).T / 0.2, torch.arange(len(out)))


class Group(Net):
    """Advantages of rows are normalized over their group, as in GRPO.

    The loss is on-policy, so its value alone does not show this.
    """

    def loss(self, out, batch):
        groups = batch["reward"].view(-1, min(4, len(out)))
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, correction=0, keepdim=True) + 1e-4)
        chosen = out.log_softmax(-1)[torch.arange(len(out)), batch["y"]]
        return -((chosen - chosen.detach()).exp() * advantages.flatten()).mean()


class GroupUnits(Group):
    def configure_micro_batches(self, stage):
        return MicroBatchRules(unit=4)


class Zero(Net):
    def loss(self, out, batch):
        return out.sum() * 0.0


class Tokens(L.LightningModule):
    """Mean over scored labels of ragged rows, unshifted; `ragged = False` scores every label."""

    ragged = True

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def training_step(self, batch, batch_idx):
        out = self.head(self.embed(batch["input_ids"]).cumsum(1).tanh())
        loss = self.loss(out, batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def loss(self, out, labels):
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    @classmethod
    def loader(cls, seed: int = 0, dtype: torch.dtype = torch.float64):
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for row in range(24):
            tokens = torch.randint(11, (9,), generator=generator)
            scored = 3 + int(torch.randint(7, (), generator=generator)) if cls.is_ragged(row) else 9
            labels = torch.where(torch.arange(9) < scored, tokens, -100)
            rows.append({"input_ids": tokens, "labels": labels})
        return DataLoader(Rows(rows), batch_size=8)

    @classmethod
    def is_ragged(cls, row):
        return cls.ragged


class ShiftedTokens(Tokens):
    """Scores labels[:, 1:], as causal language models of transformers do."""

    def loss(self, out, labels):
        return F.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class LateRagged(ShiftedTokens):
    """The first batch scores every label, so that it cannot tell rules apart."""

    @classmethod
    def is_ragged(cls, row):
        return row >= 8


class RowMeans(Tokens):
    """Mean over rows of each row's mean over its labels.

    The loss weight is the number of rows, although the batch has labels.
    """

    def loss(self, out, labels):
        terms = F.cross_entropy(out.transpose(1, 2), labels, reduction="none")
        return (terms.sum(1) / (labels != -100).sum(1)).mean()


class Miscounted(ShiftedTokens):
    def configure_micro_batches(self, stage):
        return MicroBatchRules(loss_weight=lambda batch: (batch["labels"] != -100).sum())


class Totals(Tokens):
    def configure_micro_batches(self, stage):
        return MicroBatchRules(loss_is_sum=True, prepare=self.with_totals)

    def with_totals(self, batch):
        return {**batch, "scored": (batch["labels"] != -100).sum()}

    def training_step(self, batch, batch_idx):
        out = self.head(self.embed(batch["input_ids"]).cumsum(1).tanh())
        total = batch["scored"] if "scored" in batch else (batch["labels"] != -100).sum()
        return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / total


# the check's result for each module: the rule that it finds, "unchecked", or "refused"
EXPECTED = {
    Mean: "rows",
    Dropout: "rows",
    FunctionalDropout: "rows",
    AttentionDropout: "rows",
    BatchNorm: "rows",
    RowMeans: "rows",
    Tokens: "scored labels",
    ShiftedTokens: "scored labels, shifted",
    LateRagged: "scored labels, shifted",
    Totals: "loss_is_sum",
    GroupUnits: "rows",
    Noise: "rows",
    Sum: "sum",
    ClassWeighted: "class weights 1, 2, 3, 4 of 'y'",
    Zero: "unchecked",
    Contrastive: "refused",
    Group: "refused",
    Miscounted: "refused",
}
