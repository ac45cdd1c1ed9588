"""Modules that draw random numbers in their step, and modules with dependent rows."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.modules.step_kinds import (
    CLASSES,
    FEATURES,
    TOKENS,
    CentredAtOnce,
    Checkpointed,
    CheckpointedReentrant,
    Kind,
    Recurrent,
    Transformer,
    UNet,
)


class TransformerDropout(Transformer):
    dropout = 0.1


class RecurrentDropout(Recurrent):
    dropout = 0.3


class CheckpointedDropout(Checkpointed):
    dropout = 0.3


class CheckpointedReentrantDropout(CheckpointedReentrant):
    dropout = 0.3


class Variational(Kind):
    """A variational autoencoder with separate noise for each row and a mean KL divergence."""

    def make_net(self):
        return nn.ModuleList([nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)])

    def loss(self, batch):
        encode, decode = self.net
        mean, log_variance = encode(batch["x"]).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(decode(code), batch["x"]) + 0.1 * divergence


class Diffusion(UNet):
    """A timestep and noise for each row."""

    def loss(self, batch):
        image = batch["image"]
        time = torch.randint(0, 10, (len(image),), device=image.device)
        kept = (1 - time / 10).to(image).view(-1, 1, 1, 1)
        noise = torch.randn_like(image)
        return F.mse_loss(self(kept.sqrt() * image + (1 - kept).sqrt() * noise), noise)


class ChannelDropout(UNet):
    def loss(self, batch):
        return F.mse_loss(self(F.dropout2d(batch["image"], 0.3)), batch["image"])


class DropPath(Kind):
    """Skips its hidden layer for a random half of the rows."""

    def make_net(self):
        return nn.ModuleList([nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)])

    def loss(self, batch):
        first, hidden, last = self.net
        x = first(batch["x"]).tanh()
        kept = x.new_empty(len(x), 1).bernoulli_(0.5) / 0.5
        return F.cross_entropy(last(x + kept * hidden(x).tanh()), batch["y"])


class LayerDrop(DropPath):
    """Skips its hidden layer for whole batches at a time."""

    def loss(self, batch):
        first, hidden, last = self.net
        x = first(batch["x"]).tanh()
        return F.cross_entropy(last(x + hidden(x).tanh() if torch.rand(()) < 0.7 else x), batch["y"])


class NoisyWeights(Kind):
    """One draw of noise for all rows of a batch."""

    def loss(self, batch):
        noisy = self.net[0].weight + 0.1 * torch.randn_like(self.net[0].weight)
        return F.cross_entropy(self.net[2](F.linear(batch["x"], noisy).tanh()), batch["y"])


class NumpyNoise(Kind):
    def loss(self, batch):
        noise = torch.from_numpy(np.random.randn(*batch["x"].shape)).to(batch["x"])
        return F.cross_entropy(self.net(batch["x"] + 0.1 * noise), batch["y"])


class PythonFlips(Kind):
    """Flips each row by a separate draw."""

    def loss(self, batch):
        flipped = torch.stack([-x if random.random() < 0.5 else x for x in batch["x"]])
        return F.cross_entropy(self.net(flipped), batch["y"])


class PythonFlipsAtOnce(Kind):
    """Flips all rows by one draw."""

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"] if random.random() < 0.5 else -batch["x"]), batch["y"])


class Mixup(Kind):
    """Mixes each row with another one of its batch, drawn in the step."""

    def loss(self, batch):
        x, y = batch["x"], F.one_hot(batch["y"], CLASSES).to(batch["x"])
        other = torch.randperm(len(x), device=x.device)
        return F.cross_entropy(self.net(0.7 * x + 0.3 * x[other]), 0.7 * y + 0.3 * y[other])


class MixupAtTimes(Mixup):
    """Mixes rows in three of ten batches."""

    def loss(self, batch):
        seldom = torch.rand(()) < 0.3
        return super().loss(batch) if seldom else F.cross_entropy(self.net(batch["x"]), batch["y"])


class MaskedInTheStep(Kind):
    """Draws the scored tokens in the step.

    The batch does not show the number of terms of a micro-batch.
    """

    def make_net(self):
        return nn.Sequential(nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS))

    def loss(self, batch):
        tokens = batch["tokens"]
        masked = torch.bernoulli(torch.full(tokens.shape, 0.4, device=tokens.device)).bool() & ~batch["padded"]
        return F.cross_entropy(self.net(tokens.masked_fill(masked, 0))[masked], tokens[masked])


class NumpyMixup(Kind):
    def loss(self, batch):
        x, y = batch["x"], F.one_hot(batch["y"], CLASSES).to(batch["x"])
        kept, other = np.random.beta(0.4, 0.4), np.random.permutation(len(x))
        return F.cross_entropy(self.net(kept * x + (1 - kept) * x[other]), kept * y + (1 - kept) * y[other])


class NoisyContrast(NumpyNoise):
    """Compares rows, under noise that cannot be replayed."""

    def loss(self, batch):
        noise = torch.from_numpy(np.random.randn(*batch["x"].shape)).to(batch["x"])
        codes = F.normalize(self.net(batch["x"] + 0.1 * noise), dim=1)
        return F.cross_entropy(codes @ codes.detach().T / 0.5, torch.arange(len(codes)))


class NormalisedByTheBatch(Kind):
    def loss(self, batch):
        out = self.net(batch["x"])
        return F.cross_entropy((out - out.mean(0)) / out.std(0, correction=0), batch["y"])


DRAWN = [
    TransformerDropout,
    RecurrentDropout,
    CheckpointedDropout,
    CheckpointedReentrantDropout,
    Variational,
    Diffusion,
    ChannelDropout,
    DropPath,
    LayerDrop,
    NoisyWeights,
    PythonFlipsAtOnce,
]


DRAWN_BY_ROW_ON_THE_HOST = [NumpyNoise, PythonFlips]
REFUSED = [MaskedInTheStep, Mixup, MixupAtTimes, NumpyMixup, NoisyContrast, NormalisedByTheBatch, CentredAtOnce]
