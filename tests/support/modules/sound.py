"""Sound modules: each can be split exactly, and must never be refused.

The benchmark of the exactness check runs them too.
"""

import importlib.util

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.modules.plain import Rows

CLASSES, LENGTH, WORDS = 3, 7, 12


def rows_of(seed: int, number: int = 31) -> list[dict]:
    """Return rows with features, an image, tokens, ragged labels and a class.

    The last batch is short.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(number):
        tokens = torch.randint(WORDS, (LENGTH,), generator=generator)
        scored = int(torch.randint(2, LENGTH + 1, (), generator=generator))
        rows.append(
            {
                "x": torch.randn(6, generator=generator),
                "image": torch.randn(1, 6, 6, generator=generator),
                "input_ids": tokens,
                "labels": torch.where(torch.arange(LENGTH) < scored, tokens, -100),
                "class": int(torch.randint(CLASSES, (), generator=generator)),
            }
        )
    return rows


class Sound(L.LightningModule):
    """A perceptron and cross-entropy; the subclasses change the net or the loss."""

    fields = ("x", "class")
    rule = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["class"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    @classmethod
    def loader(cls, seed: int = 0) -> DataLoader:
        rows = [{name: row[name] for name in cls.fields} for row in rows_of(seed)]
        return DataLoader(Rows(rows), batch_size=8)


class Perceptron(Sound):
    pass


class Smoothed(Sound):
    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["class"], label_smoothing=0.1)


class TwoMeans(Sound):
    fields = ("x",)

    def loss(self, batch):
        out = self.net(batch["x"])
        return F.mse_loss(out, batch["x"][:, :3]) + 0.1 * F.l1_loss(out, batch["x"][:, 3:])


class Recurrent(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.net = nn.LSTM(2, 8, 2, batch_first=True, dropout=0.2), nn.Linear(8, CLASSES)

    def loss(self, batch):
        with torch.autocast(self.device.type, enabled=False):  # not every CPU has an LSTM for it
            out = self.recurrent(batch["x"].view(-1, 3, 2))[0][:, -1]
        return F.cross_entropy(self.net(out), batch["class"])


class Convolutional(Sound):
    fields = ("image", "class")

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(4, 8),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(8, 4, 3),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["image"]), batch["class"])


class ScoredTokens(Sound):
    """A transformer layer with dropout; a mean over scored labels."""

    fields, rule = ("input_ids", "labels"), "scored labels"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(WORDS, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.net = nn.Linear(8, WORDS)

    def loss(self, batch):
        out = self.net(self.layer(self.embed(batch["input_ids"])))
        return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


class Accumulated(Sound):
    """A module trained with clipped gradients, accumulated over two batches.

    The last batch is short.
    """


class GPT2(Sound):
    fields, rule = ("input_ids", "labels"), "scored labels, shifted"

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.net = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=2, n_head=2, n_positions=16)
        )

    def loss(self, batch):
        return self.net(**batch).loss


class BERT(Sound):
    fields = ("input_ids", "class")

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.net = transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=WORDS,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                num_labels=CLASSES,
            )
        )

    def loss(self, batch):
        return self.net(input_ids=batch["input_ids"], labels=batch["class"]).loss


OPTIONS = {Accumulated: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}
SOUND = [Perceptron, Smoothed, TwoMeans, Recurrent, Convolutional, ScoredTokens, Accumulated]
if importlib.util.find_spec("transformers"):
    SOUND += [GPT2, BERT]
