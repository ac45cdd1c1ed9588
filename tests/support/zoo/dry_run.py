"""Small modules of every kind, with a batch of a few rows each."""

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from lightning_unified.planner.dry_run import DryRun, StepSpec


def trace_step(module, batch, *, rows, num_micro_batches=1, later_rows=None, recompute=None, **settings):
    """Return the trace of one step from a dry run of its own."""
    step = StepSpec(module=module, batch=batch, **settings)
    return DryRun(step, recompute=recompute).run(rows, num_micro_batches, later_rows)


class _Module(L.LightningModule):
    optimizer = "adamw"

    def configure_optimizers(self):
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        optimizer = torch.optim.AdamW(parameters, fused=True if self.optimizer == "fused" else None)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
                "interval": "step",
            },
        }


class Perceptron(_Module):
    def __init__(self, width=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "scores": scores.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    @staticmethod
    def batch(rows):
        return torch.randn(rows, 64), torch.randint(0, 10, (rows,))


class Convolutions(_Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def training_step(self, batch, batch_idx):
        x = self.stem(batch["image"])
        for block in self.blocks:
            x = x + block(x)
        x = F.max_pool2d(x, 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), batch["label"])

    @staticmethod
    def batch(rows):
        return {"image": torch.randn(rows, 3, 24, 24), "label": torch.randint(0, 10, (rows,))}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(D, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(_Module):
    def __init__(self, vocabulary=512, width=64, layers=2, heads=4, length=32, tied=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch["tokens"]) + self.positions(torch.arange(batch["tokens"].shape[1], device=self.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    @staticmethod
    def batch(rows, length=32, vocabulary=512):
        tokens = torch.randint(0, vocabulary, (rows, length))
        return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


class LowRank(Transformer):
    """A frozen transformer with a trained low-rank layer beside each output layer."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.low = nn.ModuleList(nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64)) for _ in self.blocks)

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch["tokens"])
        for block, low in zip(self.blocks, self.low, strict=True):
            x = block(x) + low(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch["labels"].flatten())


class Adversaries(L.LightningModule):
    """Two optimizers, each stepped by hand, and gradients clipped by hand."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.maker, self.judge = nn.Linear(16, 64), nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        made = self.maker(batch[:, :16])
        loss = self.judge(made.detach()).mean() - self.judge(batch).mean()
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(second, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        second.step()
        loss = -self.judge(made).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("made", loss)

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(self.maker.parameters()), torch.optim.Adam(self.judge.parameters())]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 10) for one in optimizers]

    @staticmethod
    def batch(rows):
        return torch.randn(rows, 64)
