"""The modules that campaigns train, and their batches."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from benchmarks.recovery.campaign.counted import CLASSES, WIDTH, Counted
from benchmarks.recovery.campaign.recipes import Recipe
from lightning_unified import MicroBatchRules

__all__ = ["Batches", "build"]

VOCABULARY, LENGTH, GROUP = 11, 9, 4


class Dropout(Counted):
    def build_net(self):
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, CLASSES))


class Fields(Counted):
    """Noise drawn once, as a field of the prepared batch.

    It must not depend on the split.
    """

    def configure_micro_batches(self, stage):
        return MicroBatchRules(prepare=self.prepare)

    def prepare(self, batch):
        return {**batch, "noise": torch.randn_like(batch["x"])}

    def loss(self, batch):
        noise = batch["noise"] if "noise" in batch else torch.zeros_like(batch["x"])
        return F.cross_entropy(self.net(batch["x"] + 0.3 * noise), batch["y"])


class BatchNorm(Counted):
    def build_net(self):
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


class Measures(Counted):
    """A buffer that each training step moves, and torchmetrics of three kinds.

    Metrics are logged each step and each epoch.
    """

    def __init__(self, recipe):
        super().__init__(recipe)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.accuracy, self.f1, self.average = MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES), MeanMetric()

    def measure(self, batch):
        self.mean.mul_(0.9).add_(batch["x"].mean(0), alpha=0.1)
        with torch.no_grad():
            logits = self.net(batch["x"])
        self.accuracy(logits, batch["y"])
        self.f1(logits, batch["y"])
        self.average.update(logits.max(-1).values)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.log("average", self.average, on_step=False, on_epoch=True)
        self.log("max", logits.max(), on_step=True, on_epoch=True, reduce_fx="max")


class Tokens(Counted):
    """Mean over scored labels, undeclared.

    The check before the first split must find the rule.
    """

    first = 0

    def build_net(self):
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))

    def terms(self, batch):
        return (batch["labels"][:, self.first :] != -100).sum(1).to(self.tally)

    def loss(self, batch):
        logits = self.net(batch["input_ids"])[:, : LENGTH - self.first]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, self.first :].flatten())


class Shifted(Tokens):
    """Each position scores the next one's label, as causal language models do."""

    first = 1


class Weighted(Tokens):
    """Says how many terms its loss has."""

    def configure_micro_batches(self, stage):
        return MicroBatchRules(loss_weight=self.loss_weight)

    def loss_weight(self, batch):
        return (batch["labels"] != -100).sum()


class Totals(Weighted):
    """Divides by the whole batch's totals itself."""

    def configure_micro_batches(self, stage):
        return MicroBatchRules(loss_weight=self.loss_weight, loss_is_sum=True, prepare=self.prepare)

    def prepare(self, batch):
        return {**batch, "scored": (batch["labels"] != -100).sum()}

    def total(self, batch):
        return batch["scored"] if "scored" in batch else (batch["labels"] != -100).sum()

    def loss(self, batch):
        logits = self.net(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / self.total(batch)


class Group(Counted):
    """Groups of four samples of one prompt, drawn from the policy once a batch.

    Advantages are relative to the group.
    """

    def configure_micro_batches(self, stage):
        return MicroBatchRules(prepare=self.prepare, unit=GROUP)

    def prepare(self, batch):
        probabilities = self.net(batch["x"]).softmax(-1)
        return {**batch, "chosen": torch.multinomial(probabilities, 1)[:, 0]}

    def loss(self, batch):
        chosen = batch.get("chosen", batch["y"])
        rewards = (chosen == batch["y"]).to(self.tally) + batch["x"][:, 0].abs()
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, correction=0, keepdim=True) + 0.1)
        logs = self.net(batch["x"]).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        return -((logs - logs.detach()).exp() * advantages.flatten()).mean()


class Keeps(Counted):
    """State that each step writes and that decides the loss.

    It has a counter, a generator, a moving average, a teacher and a list of losses.
    """

    def __init__(self, recipe):
        super().__init__(recipe)
        self.calls, self.losses, self.scale = 0, [], 1.0
        self.rng = np.random.default_rng(recipe.seed)
        self.centre = torch.zeros(CLASSES)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.scale = 1.0 + 0.1 * self.rng.random() + 0.01 * (self.calls % 3)
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        outputs = super().training_step(batch, batch_idx)
        self.losses.append(outputs["loss"].detach())
        return outputs

    def loss(self, batch):
        logits = self.net(batch["x"])
        with torch.no_grad():
            targets = (self.teacher(batch["x"]) - self.centre.to(logits)).softmax(-1)
        return self.scale * (F.cross_entropy(logits, batch["y"]) + 0.1 * F.cross_entropy(logits, targets))

    def measure(self, batch):
        with torch.no_grad():
            self.centre = 0.9 * self.centre.to(self.tally) + 0.1 * self.net(batch["x"]).to(self.tally).mean(0)

    def on_train_epoch_end(self):
        self.log("kept", torch.stack(self.losses).mean())
        self.losses.clear()

    def on_save_checkpoint(self, checkpoint):
        own = (self.calls, self.scale, list(self.losses), self.centre, self.rng.bit_generator.state)
        checkpoint["keeps"] = copy.deepcopy(own)

    def on_load_checkpoint(self, checkpoint):
        self.calls, self.scale, losses, self.centre, state = copy.deepcopy(checkpoint["keeps"])
        self.losses[:] = losses
        self.rng.bit_generator.state = state


class Skips(Counted):
    """Has no loss for every third batch."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else outputs


class Blocks(Counted):
    """Blocks that recomputation finds, with noise inside."""

    def norm(self) -> nn.Module:
        return nn.LayerNorm(16)

    def build_net(self):
        blocks = [nn.Sequential(nn.Linear(16, 16), self.norm(), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
        return nn.Sequential(nn.Linear(WIDTH, 16), *blocks, nn.Linear(16, CLASSES))


class NormBlocks(Blocks):
    """The same with running statistics, which must not be moved twice."""

    def norm(self):
        return nn.BatchNorm1d(16)


class Wide(Counted):
    """About 2 MiB of activations a row and half a MiB of weights: rows decide whether it fits."""

    def build_net(self):
        return nn.Sequential(nn.Linear(32, 1024), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Linear(1024, 32))

    def loss(self, batch):
        return (self.net(batch["x"]) - batch["x"]).pow(2).mean()


_KINDS = {
    "mlp": Counted,
    "dropout": Dropout,
    "fields": Fields,
    "batch_norm": BatchNorm,
    "measures": Measures,
    "tokens": Tokens,
    "shifted": Shifted,
    "weighted": Weighted,
    "totals": Totals,
    "grpo": Group,
    "keeps": Keeps,
    "skips": Skips,
    "blocks": Blocks,
    "norm_blocks": NormBlocks,
    "wide": Wide,
}


def build(recipe: Recipe) -> Counted:
    """Return the recipe's module, its weights a function of the recipe's seed."""
    torch.manual_seed(recipe.seed)
    return _KINDS[recipe.model](recipe)


class Batches:
    """The batches of a run, in an order of its own each epoch.

    The loader remembers its place, as Lightning asks of a loader that can resume.

    Args:
        recipe: Says how many rows there are and how many a batch has.
        training: False for a few rows of validation in a fixed order.
    """

    def __init__(self, recipe: Recipe, *, training: bool = True) -> None:
        self._batch, self._training = recipe.batch, training
        self._rows = recipe.rows if training else max(recipe.batch + recipe.unit, 2 * recipe.unit)
        dtype = torch.float64 if recipe.precision == "64-true" else torch.float32
        generator = torch.Generator().manual_seed(recipe.seed + (0 if training else 1))
        shape = (128, 32) if recipe.model == "wide" else (WIDTH,)
        if issubclass(_KINDS[recipe.model], Tokens):
            tokens = torch.randint(VOCABULARY, (self._rows, LENGTH), generator=generator)
            scored = torch.randint(2, LENGTH + 1, (self._rows, 1), generator=generator)
            labels = tokens.where(torch.arange(LENGTH) < scored, torch.tensor(-100))
            self._columns = {"input_ids": tokens, "labels": labels}
        else:
            x = torch.randn(self._rows, *shape, generator=generator).to(dtype)
            self._columns = {"x": x, "y": torch.randint(CLASSES, (self._rows,), generator=generator)}
        self._seed, self._epoch, self._position, self._resumed = recipe.seed, 0, 0, False

    def __len__(self) -> int:
        return (self._rows + self._batch - 1) // self._batch

    def __iter__(self):
        if self._position >= len(self):
            self._epoch, self._position = self._epoch + 1, 0
        elif not self._resumed:
            self._position = 0
        self._resumed = False
        if not self._training:
            self._position = 0
        shuffled = torch.randperm(self._rows, generator=torch.Generator().manual_seed(self._seed + self._epoch))
        order = shuffled if self._training else torch.arange(self._rows)
        torch.empty((), dtype=torch.int64).random_()  # as a DataLoader does: making an iterator moves the global stream
        while self._position < len(self):
            rows = order[self._position * self._batch : (self._position + 1) * self._batch]
            self._position += 1
            names = [f"row {row}" for row in rows.tolist()]
            yield {"id": rows, "name": names, **{name: column[rows] for name, column in self._columns.items()}}

    def state_dict(self) -> dict:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict) -> None:
        self._epoch, self._position, self._resumed = state["epoch"], state["position"], True
