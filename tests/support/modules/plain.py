"""Small modules whose steps are compared: plain Lightning against the unified strategy."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_unified import MicroBatchRules


class Rows(Dataset):
    """Rows that are the same in every run."""

    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return self.rows[index]


class Recorder(L.Callback):
    """Records the values that a callback sees of each batch."""

    def __init__(self) -> None:
        self.outputs, self.callback_metrics, self.gradients, self.after_backward, self.zeroed = [], [], [], 0, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.callback_metrics.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(
            torch.cat([p.grad.to_dense().flatten().clone() for p in pl_module.parameters() if p.grad is not None])
        )

    def on_after_backward(self, trainer, pl_module):
        self.after_backward += 1

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.zeroed += 1


class MLP(L.LightningModule):
    """Mean over rows; logs every reduction and torchmetrics.

    The step returns predictions beside the loss.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))
        self.accuracy, self.f1, self.error = MulticlassAccuracy(4), MulticlassF1Score(4), MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["y"]
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.f1(logits, y)
        self.error.update(logits.softmax(-1)[:, 0], (y == 0).to(logits))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("sum", logits.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("max", logits.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("min", logits.min(), on_step=True, on_epoch=True, reduce_fx="min")
        self.log("given", (x**2).mean(), on_step=True, on_epoch=True, batch_size=len(x))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return {
            "loss": loss,
            "logits": logits,
            "confidence": logits.softmax(-1).max(-1).values.mean(),
            "names": batch["name"],
        }

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }

    @staticmethod
    def loader(rows: int = 22, batch_size: int = 8, dtype: torch.dtype = torch.float64) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        data = [
            {
                "x": torch.randn(6, generator=generator, dtype=dtype),
                "y": int(torch.randint(4, (), generator=generator)),
                "name": f"row {row}",
            }
            for row in range(rows)
        ]
        return DataLoader(Rows(data), batch_size=batch_size)


class RaggedTokens(L.LightningModule):
    """Mean over scored tokens; their number differs between rows, and some rows have none."""

    def __init__(self, sums: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.sums = sums

    def configure_micro_batches(self, stage):
        if self.sums:
            return MicroBatchRules(loss_weight=self.terms, loss_is_sum=True, prepare=self.with_totals)
        return MicroBatchRules(loss_weight=self.terms)

    def with_totals(self, batch):
        return {**batch, "scored": (batch["labels"] != -100).sum()}

    def terms(self, batch):
        return (batch["labels"] != -100).sum()

    def training_step(self, batch, batch_idx):
        logits = self.head(self.embed(batch["tokens"]).cumsum(1))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = loss / batch.get("scored", (batch["labels"] != -100).sum())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    @staticmethod
    def loader(rows: int = 22, batch_size: int = 8) -> DataLoader:
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(11, (rows, 9), generator=generator)
        labels = tokens.roll(-1, 1)
        for row in range(rows):
            labels[row, row % 10 :] = -100
        return DataLoader(
            Rows([{"tokens": t, "labels": l} for t, l in zip(tokens, labels, strict=True)]), batch_size=batch_size
        )


def fit(
    module: L.LightningModule, loader: DataLoader, *, strategy="auto", callbacks=(), **options
) -> tuple[Recorder, L.Trainer]:
    """Train `module` in float64 from seed 3; return a callback's records.

    The Trainer shows no output.
    """
    torch.manual_seed(3)
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision=options.pop("precision", "64-true"),
        max_epochs=options.pop("max_epochs", 2),
        callbacks=[recorder, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader)
    return recorder, trainer


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
