"""Exactness checks of ranks that hold shards."""

import threading
from typing import Any

import lightning as L
import torch
from torch.nn import functional as F

from lightning_unified import UnifiedFSDPStrategy
from lightning_unified.errors import LightningUnifiedError
from lightning_unified.step.exactness.check import ExactnessCheck
from lightning_unified.step.exactness.trials.run import Runner
from tests.support.modules.auxiliary import WithAuxiliaryLoss
from tests.support.ranks.modules import TEXT
from tests.support.ranks.shard_faults import local_rank
from tests.support.ranks.sharded import FEW, SETTINGS, Deep, trained


class Scored(Deep):
    """Scores some labels only, of some rows none, and counts its rows in a buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("rows_seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        labels = batch["labels"]
        loss = self.loss(batch)
        self.rows_seen += len(labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(labels))
        return {"loss": loss, "scored": (labels != -100).sum()}

    def _loader(self):
        loader = super()._loader()
        for row in loader.dataset:
            row["labels"][row["labels"] < 6] = -100
        return loader

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs["scored"]))


class Dropping(Scored):
    def __init__(self, **options: Any) -> None:
        super().__init__(drop=0.3, **options)


class Unscored(Scored):
    """Has batches without a scored label on the first rank."""

    def _loader(self):
        loader = super()._loader()
        for row in loader.dataset[4:8] if self.part[0] == 0 else ():
            row["labels"][:] = -100
        return loader


class Contrastive(Deep):
    def loss(self, batch):
        rows = self(batch["tokens"]).mean(1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device))


class ContrastiveValidation(Deep):
    def validation_step(self, batch, batch_idx):
        if batch["tokens"].size(0) < 3:
            raise ValueError("too few rows to compare")
        super().validation_step(batch, batch_idx)


class Wrapped(Deep):
    """Holds the network as a submodule, and validates by calling its layers: the root's forward never runs."""

    def validation_step(self, batch, batch_idx):
        hidden = self.norm(self.embed(batch["tokens"]))
        self.log("val", F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten()), sync_dist=True)


class Clamping(Deep):
    """Clips its weights after the forward pass."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.clamp_(-0.3, 0.3)
        return loss


class DrawsOnFirst(Deep):
    """Draws a number on the first rank only, such as that of a row to show."""

    def training_step(self, batch, batch_idx):
        if self.part[0] == 0:
            print("row", int(torch.randint(2, ())))
        return super().training_step(batch, batch_idx)


class FailsOnSecond(Deep):
    """Fails on the second rank, for few rows."""

    def training_step(self, batch, batch_idx):
        if self.part[0] == 1 and len(batch["tokens"]) < 3:
            raise KeyError("no such column")
        return super().training_step(batch, batch_idx)


class ContrastiveAtTimes(Contrastive):
    """Compares rows on the second rank only, from the batch on in which its tokens end."""

    def loss(self, batch):
        own = Deep.loss(self, batch)
        return own + super().loss(batch) if (batch["tokens"] == 0).all(1).any() else own

    def _loader(self):
        loader = super()._loader()
        if self.part[0] == 1:
            loader.dataset[10]["tokens"] = torch.zeros(5, dtype=torch.long)
        else:
            for row in loader.dataset:
                row["tokens"][0] = 1
        for row in loader.dataset[:10]:
            row["tokens"][0] = 1
        return loader


class LogsAtTimes(Deep):
    """Logs another value on the second rank, in its third batch."""

    def training_step(self, batch, batch_idx):
        if self.part[0] == 1 and batch_idx == 2:
            self.log("largest", batch["labels"].double().amax(), on_step=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics.get("largest", torch.zeros(()))))


class Auxiliary(Deep):
    def forward(self, tokens):
        rows = super().forward(tokens)
        return WithAuxiliaryLoss.apply(rows, 0.1 * rows.pow(2).mean())


class Sealed(Deep):
    """Has batches that cannot be sent."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "lock": threading.Lock()}


KINDS = {
    "scored": Scored,
    "dropping": Dropping,
    "contrastive": Contrastive,
    "contrastive at times": ContrastiveAtTimes,
    "logs at times": LogsAtTimes,
    "sealed": Sealed,
    "contrastive validation": ContrastiveValidation,
    "wrapped": Wrapped,
    "clamping": Clamping,
    "auxiliary": Auxiliary,
    "draws on first": DrawsOnFirst,
    "fails on second": FailsOnSecond,
}
VALIDATED = {"contrastive validation", "wrapped"}
ROWS_OF = {"scored": 12}  # a batch and a short one


class CountsChecks(L.Callback):
    """Counts the checks that this rank runs, and reads what the module has counted."""

    rows_seen = 0.0

    def on_fit_end(self, trainer, module):
        self.rows_seen = float(getattr(module, "rows_seen", 0))

    def __init__(self) -> None:
        self.count, check = 0, ExactnessCheck._check

        def counted(own: ExactnessCheck, asked: Any) -> range:
            self.count += 1
            return check(own, asked)

        ExactnessCheck._check = counted


def run(name: str, rows: Any = 1, **arguments: Any) -> dict[str, Any]:
    """Return the fit of a module and the number of its checks, or its refusal."""
    checks = CountsChecks()
    strategy = UnifiedFSDPStrategy(hold="shards", micro_batch_size=rows, evaluation_micro_batch_size=rows, **arguments)
    settings = {
        **SETTINGS["plain"],
        "limit_val_batches": 1.0 if name in VALIDATED else 0,
        "module": {"rows": ROWS_OF.get(name, FEW)},
    }
    try:
        fits = trained(strategy, checks, ranks=2, rank=local_rank(), kind=KINDS[name], **settings)
    except LightningUnifiedError as error:
        return {"refused": f"{type(error).__name__}: {error}", "checks": checks.count}
    return {**fits, "checks": checks.count, "rows seen": checks.rows_seen}


def several(*runs: tuple[str, Any]) -> dict[tuple[str, Any], dict[str, Any]]:
    return {(name, rows): run(name, rows) for name, rows in runs}


def windows_by_terms(*rows: Any) -> list[list[torch.Tensor]]:
    """Return the weights after windows of two batches, for each micro-batch size, with each kind of rank."""
    return [
        [
            trained(
                UnifiedFSDPStrategy(hold=hold, micro_batch_size=size, window_mean="terms"),
                ranks=2,
                rank=local_rank(),
                kind=Unscored,
                **{**SETTINGS["clipped windows"], "module": {"rows": FEW}, "limit_val_batches": 0},
            )["weights"]
            for hold in ("parameters", "shards")
        ]
        for size in rows
    ]


def failing(recover: bool) -> dict[str, Any]:
    return run("fails on second", recover=recover)


def short_of_memory() -> dict[str, Any]:
    """Return a fit in whose first check one rank runs out of memory, with more than two rows."""
    once = Runner.run

    def run_rows(own: Runner, kwargs: Any, batch: Any, draws: Any, **options: Any) -> Any:
        found = once(own, kwargs, batch, draws, **options)
        if local_rank() == 1 and len(batch["tokens"]) > 2:
            raise RuntimeError(TEXT)
        return found

    Runner.run = run_rows
    return run("dropping")
