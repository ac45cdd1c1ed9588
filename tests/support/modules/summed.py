"""Modules whose loss is a sum of means over different terms."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support.modules.plain import Rows

NONE = torch.tensor(-100)


def loader(seed=0, *, rows=40, size=16, sparse=False, dtype=torch.float64):
    """Return batches of sequences with scored tokens, classes and two masks; the last batch is short.

    With `sparse`, one of four rows has a rare class, and the mask `second` is 0 for the first seven rows of each batch.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for row in range(rows):
        tokens = torch.randint(0, 5, (5,), generator=generator)
        tokens[torch.rand(5, generator=generator) < 0.6] = -100
        rare = torch.randint(0, 5, (), generator=generator)
        is_lacking = row % size not in (3, 4, 11, 14) if sparse else bool(torch.rand((), generator=generator) < 0.5)
        second = (torch.rand(5, generator=generator) < 0.4).to(dtype)
        found.append(
            {
                "x": torch.randn(5, 6, generator=generator, dtype=torch.float64).to(dtype),
                "labels": tokens,
                "next": torch.randint(0, 2, (), generator=generator),
                "rare": NONE if is_lacking else rare,
                "first": (torch.rand(5, generator=generator) < 0.5).to(dtype),
                "second": torch.zeros(5, dtype=dtype) if sparse and row % size < 7 else second,
            }
        )
    return DataLoader(Rows(found), batch_size=size)


class Summed(L.LightningModule):
    """Two heads on a trunk; subclasses define and log the summands of the loss."""

    loader = staticmethod(loader)

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.tokens, self.rows = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.trunk(batch["x"]).tanh(), batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def of_tokens(self, hidden, batch):
        return F.cross_entropy(self.tokens(hidden).flatten(0, 1), batch["labels"].flatten())

    def of_rows(self, hidden, batch):
        return F.cross_entropy(self.rows(hidden[:, 0]), batch["next"])

    def loss(self, hidden, batch):
        return self.of_tokens(hidden, batch) + self.of_rows(hidden, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def mean_of(values, mask):
    return (values * mask).sum() / mask.sum()


class Pretraining(Summed):
    """Logs each summand, a figure of rows and one of tokens."""

    def loss(self, hidden, batch):
        tokens, rows = self.of_tokens(hidden, batch), self.of_rows(hidden, batch)
        self.log_dict({"tokens": tokens, "rows": rows, "both": 2 * (tokens + rows)})
        self.log("accuracy", (self.rows(hidden[:, 0]).argmax(1) == batch["next"]).to(tokens).mean())
        is_scored = batch["labels"] != -100
        self.log("right", (self.tokens(hidden).argmax(-1) == batch["labels"])[is_scored].to(tokens).mean())
        return tokens + rows


class TwoMasks(Summed):
    def loss(self, hidden, batch):
        squares = self.tokens(hidden).square().mean(-1)
        return mean_of(squares, batch["first"]) + 0.1 * mean_of(hidden.mean(-1), batch["second"])


class Tasks(Summed):
    """Has two tasks with one head, each with its own missing labels."""

    def loss(self, hidden, batch):
        rare = F.cross_entropy(self.tokens(hidden[:, 0]), batch["rare"])
        self.log("rare", rare)
        return self.of_tokens(hidden, batch) + 2 * rare


class Switched(Summed):
    """Leaves out a task without labels."""

    def loss(self, hidden, batch):
        found, mask = self.of_rows(hidden, batch), batch["second"] > 0
        if (known := batch["rare"] != -100).any():
            found = found + F.cross_entropy(self.tokens(hidden[:, 0])[known], batch["rare"][known])
        if mask.any():
            found = found + 0.5 * self.tokens(hidden)[mask].square().mean()
        return found


class AtLeastOne(Summed):
    """Divides a sum over all rows by a count of some, as losses of detectors do."""

    def loss(self, hidden, batch):
        positive = (batch["rare"] != -100).to(hidden)
        logits = self.tokens(hidden[:, 0])[:, 0]
        focal = F.binary_cross_entropy_with_logits(logits, positive, reduction="sum") / positive.sum().clamp(min=1)
        return focal + self.of_rows(hidden, batch)


class Uncertain(Summed):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(2))

    def loss(self, hidden, batch):
        losses = self.of_tokens(hidden, batch), self.of_rows(hidden, batch)
        return sum(torch.exp(-scale) * one + scale for scale, one in zip(self.scales, losses, strict=True))


class Penalized(Summed):
    """Adds a penalty of all parameters, and a constant."""

    def loss(self, hidden, batch):
        penalty = sum(one.square().sum() for one in self.parameters())
        self.log("penalty", penalty)
        return super().loss(hidden, batch) + 1e-2 * penalty + 2.5


class Stacked(Summed):
    """Returns a dict, with its summands as a tensor and as a number."""

    def training_step(self, batch, batch_idx):
        hidden = self.trunk(batch["x"]).tanh()
        losses = [self.of_tokens(hidden, batch), self.of_rows(hidden, batch)]
        return {"loss": torch.stack(losses).mean(), "tokens": losses[0].detach(), "rows": losses[1].item()}


class InPlace(Summed):
    def loss(self, hidden, batch):
        total = self.of_tokens(hidden, batch)
        total -= 0.3 * self.of_rows(hidden, batch)
        return total / 3


class Checkpointed(Summed):
    def of_tokens(self, hidden, batch):
        return checkpoint(super().of_tokens, hidden, batch, use_reentrant=False)


class Preferring(Summed):
    """Adds an odds ratio over rows to a mean over tokens, as ORPO does."""

    def loss(self, hidden, batch):
        labels = batch["labels"]
        scored, chances = labels != -100, self.tokens(hidden).log_softmax(-1)
        chosen = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        average = (chosen * scored).sum(1) / scored.sum(1).clamp(min=1)
        odds = -F.logsigmoid(average - self.rows(hidden[:, 0]).mean(1)).mean()
        self.log("odds", odds)
        return self.of_tokens(hidden, batch) + 0.1 * odds


class Late(Summed):
    """Begins with one summand."""

    def loss(self, hidden, batch):
        tokens = self.of_tokens(hidden, batch)
        return tokens + self.of_rows(hidden, batch) if self.global_step >= 2 else tokens


class LateThird(Summed):
    def loss(self, hidden, batch):
        both = super().loss(hidden, batch)
        return both + mean_of(hidden.mean(-1), batch["first"]) if self.current_epoch else both


class Exchanged(Summed):
    """Divides by another count from the third step on."""

    def loss(self, hidden, batch):
        mask = batch["first"] if self.global_step < 2 else batch["second"]
        return mean_of(self.tokens(hidden).square().mean(-1), mask) + hidden.square().mean()


class Contrastive(Summed):
    """Has a summand that compares rows."""

    def loss(self, hidden, batch):
        rows = hidden.mean(1)
        return self.of_tokens(hidden, batch) + (rows @ rows.T).square().mean()


class Product(Summed):
    def loss(self, hidden, batch):
        return self.of_tokens(hidden, batch) * self.of_rows(hidden, batch)


class Reused(Summed):
    """Computes with the sum of its summands once more."""

    def loss(self, hidden, batch):
        total = super().loss(hidden, batch)
        return total + total.square()


class OfCounts(Summed):
    """Weights classes by their number in the batch."""

    def of_rows(self, hidden, batch):
        weight = 1 / (1 + torch.bincount(batch["next"], minlength=2)).to(hidden)
        return F.cross_entropy(self.rows(hidden[:, 0]), batch["next"], weight=weight)
