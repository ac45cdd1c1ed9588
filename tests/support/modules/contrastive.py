"""Modules whose loss compares rows.

Each comes with its row-wise encoders and the loader of its batches.
"""

from functools import lru_cache

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAccuracy

from lightning_unified import MicroBatchRules
from tests.support.modules.plain import Rows, fit, weights


def network(inputs=6, outputs=4):
    return nn.Sequential(nn.Linear(inputs, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, outputs))


class Contrastive(L.LightningModule):
    """Two views of each row, a loss over all pairs, three kinds of logs, and outputs by row."""

    encoders = ("net",)

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = network(), BinaryAccuracy()

    def configure_micro_batches(self, stage):
        return MicroBatchRules(encoders=self.encoders)

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "val")

    def step(self, batch, stage):
        loss, embedded = self.loss(batch)
        self.seen((embedded.detach()[:, 0] > 0).int(), (embedded.detach()[:, 1] > 0).int())
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True)
        self.log(f"{stage}_seen", self.seen, on_step=True, on_epoch=True)
        self.log(f"{stage}_hardest", (embedded @ embedded.T).detach().fill_diagonal_(0).max(), reduce_fx="max")
        return {"loss": loss, "embedded": embedded.detach()}

    def loss(self, batch):
        one, other = self.net(batch["x"]), self.net(batch["y"])
        return info_nce(one, other), one

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    @staticmethod
    def loader(rows=20, batch_size=8, dtype=torch.float64):
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
        data = [{"x": draw(6), "y": draw(6), "z": draw(5), "label": row % 3} for row in range(rows)]
        return DataLoader(Rows(data), batch_size=batch_size)


def info_nce(one, other):
    similar = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T / 0.2
    labels = torch.arange(len(similar))
    return (F.cross_entropy(similar, labels) + F.cross_entropy(similar.T, labels)) / 2


class SimCLR(Contrastive):
    """Both views in one call of twice the rows, then a projector with BatchNorm.

    The projector's BatchNorm sees the whole batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def loss(self, batch):
        hidden = self.net(torch.cat([batch["x"], batch["y"]]))
        projected = F.normalize(self.projector(hidden), dim=-1)
        similar = (projected @ projected.T / 0.2).fill_diagonal_(-1e9)
        rows = len(batch["x"])
        return F.cross_entropy(similar, torch.arange(2 * rows).roll(rows)), hidden


class Clip(Contrastive):
    """Two encoders of different inputs, and a learnt temperature.

    The second encoder is inside a container.
    """

    encoders = ("net", "towers.text")

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"text": network(5)})
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def loss(self, batch):
        image, text = self.net(batch["x"]), self.towers["text"](batch["z"])
        similar = F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T * self.temperature.exp()
        return F.cross_entropy(similar, torch.arange(len(similar))), image


class Triplet(Contrastive):
    """Anchor, positive, and the hardest negative of the whole batch."""

    def loss(self, batch):
        anchor, positive = self.net(batch["x"]), self.net(batch["y"])
        with torch.no_grad():
            far = torch.cdist(anchor, positive).fill_diagonal_(1e9).argmin(1)
        return F.triplet_margin_loss(anchor, positive, positive[far]), anchor


class Supervised(Contrastive):
    """Rows with the same label are positives."""

    def loss(self, batch):
        embedded = F.normalize(self.net(batch["x"]), dim=-1)
        similar = embedded @ embedded.T / 0.2 - 1e9 * torch.eye(len(embedded), dtype=embedded.dtype)
        same = (batch["label"][:, None] == batch["label"]).to(embedded).fill_diagonal_(0)
        return -(similar.log_softmax(1) * same).sum(1).div(same.sum(1).clamp(min=1)).mean(), embedded


class Momentum(Contrastive):
    """A query encoder, and a frozen key encoder without gradients."""

    encoders = ("net", "key")

    def __init__(self) -> None:
        super().__init__()
        self.key = network().requires_grad_(False)

    def loss(self, batch):
        query = self.net(batch["x"])
        with torch.no_grad():
            key = self.key(batch["y"])
        return info_nce(query, key), query


class Chained(Contrastive):
    """A second encoder reads the first one's output, so its inputs have gradients."""

    encoders = ("net", "head")

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def loss(self, batch):
        one, other = self.head(self.net(batch["x"])), self.head(self.net(batch["y"]))
        return info_nce(one, other), one


class Nested(Contrastive):
    """One named submodule inside another."""

    encoders = ("net", "net.3")


class Texts(Contrastive):
    """A transformer of tokens and masks, given by name, and its first position beside its mean."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        self.net = transformers.BertModel(
            transformers.BertConfig(
                vocab_size=13,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=16,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    def loss(self, batch):
        output = self.net(**batch["tokens"], output_hidden_states=True)
        mask = batch["tokens"]["attention_mask"][..., None]
        pooled = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
        return info_nce(pooled, output.pooler_output) + output.hidden_states[1].square().mean(), pooled

    @staticmethod
    def loader(rows=20, batch_size=8, dtype=torch.float64):
        generator = torch.Generator().manual_seed(1)
        data = []
        for row in range(rows):
            tokens = torch.randint(13, (8,), generator=generator)  # as many positions as the batch has rows
            data.append({"tokens": {"input_ids": tokens, "attention_mask": (torch.arange(8) < 3 + row % 6).long()}})
        return DataLoader(Rows(data), batch_size=batch_size)


def run(kind, strategy="auto", *callbacks, precision="64-true", **options):
    torch.manual_seed(0)
    module = kind().to(torch.float64 if precision == "64-true" else torch.float32)
    loader = kind.loader(dtype=torch.float64 if precision == "64-true" else torch.float32)
    seen, trainer = fit(module, loader, strategy=strategy, callbacks=callbacks, precision=precision, **options)
    return module, seen, trainer


@lru_cache(maxsize=32)
def plainly(kind, precision="64-true", **options):
    return run(kind, precision=precision, **options)


def is_as_plain(kind, found, *, atol=1e-12, **options):
    module, seen, _ = found
    plain, expected, _ = plainly(kind, **options)
    torch.testing.assert_close(weights(module), weights(plain), rtol=0, atol=atol)
    torch.testing.assert_close(list(module.buffers()), list(plain.buffers()), rtol=0, atol=atol)
    assert len(seen.outputs) == len(expected.outputs)
    for one, other in zip(seen.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
    for one, other in zip(seen.callback_metrics, expected.callback_metrics, strict=True):
        assert one == pytest.approx(other, abs=10 * atol)
    assert seen.after_backward == expected.after_backward
