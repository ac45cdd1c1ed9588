"""Training steps as users write them, whose result a split leaves as it is.

`drawn_kinds` holds the steps that draw random numbers for each micro-batch, and those that are refused.
"""

import copy

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support.modules.plain import Rows

CLASSES, FEATURES, TOKENS, LENGTH = 4, 6, 12, 5


class Kind(L.LightningModule):
    """A small net over rows of features; each subclass changes the net or its step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.make_net()

    def make_net(self):
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, 0.1, momentum=0.9)

    @staticmethod
    def loader(rows: int = 22) -> DataLoader:
        """Return batches of 8, 8 and 6 rows: features, images, padded tokens and classes."""
        generator = torch.Generator().manual_seed(5)
        data = []
        for row in range(rows):
            padded = torch.arange(LENGTH) >= 2 + row % (LENGTH - 1)
            data.append(
                {
                    "x": torch.randn(FEATURES, generator=generator),
                    "image": torch.randn(1, 8, 8, generator=generator),
                    "tokens": torch.randint(1, TOKENS, (LENGTH,), generator=generator).masked_fill(padded, 0),
                    "padded": padded,
                    "y": torch.randint(CLASSES, (), generator=generator),
                }
            )
        return DataLoader(Rows(data), batch_size=8)


class Transformer(Kind):
    """Pools the tokens that are not padding."""

    dropout = 0.0

    def make_net(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=self.dropout, batch_first=True)
        return nn.ModuleList(
            [
                nn.Embedding(TOKENS, 8),
                nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                nn.Linear(8, CLASSES),
            ]
        )

    def loss(self, batch):
        embed, encode, head = self.net
        hidden = encode(embed(batch["tokens"]), src_key_padding_mask=batch["padded"])
        there = (~batch["padded"]).to(hidden).unsqueeze(-1)
        return F.cross_entropy(head((hidden * there).sum(1) / there.sum(1)), batch["y"])


class Recurrent(Kind):
    """A two-layer LSTM followed by a two-layer GRU."""

    dropout = 0.0

    def make_net(self):
        lstm = nn.LSTM(2, 8, 2, batch_first=True, dropout=self.dropout)
        gru = nn.GRU(8, 8, 2, batch_first=True, dropout=self.dropout, bidirectional=True)
        return nn.ModuleList([lstm, gru, nn.Linear(16, CLASSES)])

    def loss(self, batch):
        lstm, gru, head = self.net
        hidden = gru(lstm(batch["x"].view(-1, 3, 2))[0])[0]
        return F.cross_entropy(head(hidden[:, -1]), batch["y"])


class UNet(Kind):
    """Reconstructs an image; GroupNorm, a pooled path and a skip connection."""

    def make_net(self):
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU())  # noqa: E731
        return nn.ModuleList([block(1, 4), block(4, 8), block(12, 4), nn.Conv2d(4, 1, 1)])

    def forward(self, image):
        first, second, third, head = self.net
        fine = first(image)
        coarse = F.interpolate(second(F.avg_pool2d(fine, 2)), scale_factor=2)
        return head(third(torch.cat([fine, coarse], 1)))

    def loss(self, batch):
        return F.mse_loss(self(batch["image"]), batch["image"])


class FrozenBatchNorm(Kind):
    """A residual net whose BatchNorm layers are in eval mode, as detectors have them."""

    def make_net(self):
        block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.ReLU())
        return nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), block, nn.Linear(4, CLASSES)])

    def loss(self, batch):
        stem, block, head = self.net
        hidden = stem(batch["image"])
        return F.cross_entropy(head((hidden + block(hidden)).mean((2, 3))), batch["y"])


class WeightNorm(Kind):
    def make_net(self):
        hidden = parametrizations.weight_norm(nn.Linear(FEATURES, 16))
        return nn.Sequential(hidden, nn.Tanh(), parametrizations.orthogonal(nn.Linear(16, CLASSES)))


class SpectralNorm(Kind):
    """A net with a power iteration that writes buffers once per forward pass."""

    def make_net(self):
        hidden = parametrizations.spectral_norm(nn.Linear(FEATURES, 16))
        return nn.Sequential(hidden, nn.Tanh(), nn.utils.spectral_norm(nn.Linear(16, CLASSES)))


class Checkpointed(Kind):
    """Recomputes its hidden layer in the backward pass."""

    reentrant, dropout = False, 0.0

    def make_net(self):
        hidden = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(self.dropout))
        return nn.ModuleList([nn.Linear(FEATURES, 16), hidden, nn.Linear(16, CLASSES)])

    def loss(self, batch):
        first, hidden, last = self.net
        kept = checkpoint(hidden, first(batch["x"]), use_reentrant=self.reentrant)
        return F.cross_entropy(last(kept), batch["y"])


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Compiled(Kind):
    def make_net(self):
        return torch.compile(super().make_net())


class LabelSmoothing(Kind):
    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["y"], label_smoothing=0.1)


class Focal(Kind):
    def loss(self, batch):
        terms = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        return ((1 - (-terms).exp()) ** 2 * terms).mean()


class MultiTask(Kind):
    """Returns its losses and outputs in a dict, and logs another."""

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        losses = {"class": F.cross_entropy(logits, batch["y"]), "size": F.l1_loss(logits[:, 0], batch["x"].norm(dim=1))}
        self.log_dict({f"loss/{name}": loss for name, loss in losses.items()}, on_step=True, on_epoch=True)
        return {"loss": sum(losses.values()), "losses": losses, "outputs": {"logits": logits, "y": batch["y"]}}


class GradientPenalty(Kind):
    """Differentiates the output with respect to the input inside the step."""

    def loss(self, batch):
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return F.cross_entropy(self.net(x), batch["y"]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


class MeanTeacher(Kind):
    """Moves a teacher towards the weights in each step, then learns from it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return super().loss(batch) + F.mse_loss(self.net(batch["x"]), self.teacher(batch["x"]))


class Centred(Kind):
    """DINO's centre, subtracted before the next batch's loss.

    The centre is the mean of a teacher's outputs, averaged over batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES))

    def loss(self, batch):
        student = self.net(batch["x"])
        teacher = self.net(batch["x"] * 0.9).detach()
        loss = -((teacher - self.centre).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()
        self.centre.mul_(0.9).add_(teacher.mean(0), alpha=0.1)
        return loss


class CentredAtOnce(Centred):
    """Subtracts this batch's own mean: each row's loss depends on the other rows."""

    def loss(self, batch):
        teacher = self.net(batch["x"] * 0.9).detach()
        self.centre.copy_(0.5 * self.centre + 0.5 * teacher.mean(0))
        return -((teacher - self.centre).softmax(-1) * self.net(batch["x"]).log_softmax(-1)).sum(-1).mean()


SAME = [
    Kind,
    Transformer,
    Recurrent,
    UNet,
    FrozenBatchNorm,
    WeightNorm,
    SpectralNorm,
    Checkpointed,
    CheckpointedReentrant,
    LabelSmoothing,
    Focal,
    MultiTask,
    GradientPenalty,
    MeanTeacher,
    Centred,
]
