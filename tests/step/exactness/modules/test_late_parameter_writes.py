"""Parameters that a step writes after it has used them in another way than by calling their layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.modules.plain import fit, weights
from tests.support.modules.step_kinds import FEATURES, Kind

CLASSES = 20  # so that the weights are not few enough to be compared after each batch


class Prototypes(nn.Module):
    """A layer whose `forward` no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, FEATURES))

    def score(self, x):
        return x @ self.weight.T


class Scores(Kind):
    """Scores by another method than `forward`."""

    def make_net(self):
        return Prototypes()

    def loss(self, batch):
        return F.cross_entropy(self.net.score(batch["x"]), batch["y"])

    @property
    def written(self):
        return self.net.weight


class TakesWeight(Scores):
    """Takes the weight of a layer, and does not call it."""

    def make_net(self):
        net = nn.Linear(FEATURES, CLASSES)
        nn.init.normal_(net.weight)
        return net

    def loss(self, batch):
        return F.cross_entropy(F.linear(batch["x"], self.net.weight), batch["y"])


class TakesByName(TakesWeight):
    """Takes the weight of a layer from the module's parameters."""

    def loss(self, batch):
        return F.cross_entropy(batch["x"] @ dict(self.named_parameters())["net.weight"].t(), batch["y"])


class Transposes(Scores):
    """Uses the transpose of a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(CLASSES, FEATURES))

    def make_net(self):
        return nn.Identity()

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"]) @ self.table.T, batch["y"])

    @property
    def written(self):
        return self.table


def late(kind):
    """Return a module that clamps its weight after the loss."""

    class Late(kind):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.written.data.clamp_(-0.5, 0.5)
            return loss

    return Late


def early(kind):
    """Return a module that normalizes its weight before the loss."""

    class Early(kind):
        def training_step(self, batch, batch_idx):
            self.written.data = F.normalize(self.written.data, dim=1)
            return super().training_step(batch, batch_idx)

    return Early


def trained(kind, strategy="auto"):
    torch.manual_seed(0)
    module = kind().double()
    fit(module, kind.loader(), strategy=strategy, max_epochs=1)
    return weights(module)


KINDS = [Scores, TakesWeight, TakesByName, Transposes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_write_is_refused(kind):
    with pytest.raises(SplitError, match=r"in its step, after its forward pass has used it"):
        trained(late(kind), UnifiedStrategy(micro_batch_size=3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_before_the_use_is_split(kind):
    torch.testing.assert_close(
        trained(early(kind), UnifiedStrategy(micro_batch_size=3)), trained(early(kind)), rtol=1e-10, atol=1e-12
    )


class SetsItself(Kind):
    """Sets its scale from the first batch that it gets, as layers of flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

    def loss(self, batch):
        if not self.is_set:
            self.scale.data = 1 / batch["x"].std(0)
            self.is_set.fill_(True)
        return F.cross_entropy(self.net(batch["x"] * self.scale), batch["y"])


def test_a_parameter_that_the_first_batch_sets_is_named():
    with pytest.raises(SplitError, match=r"The step sets scale by the rows that it gets before it uses them"):
        trained(SetsItself, UnifiedStrategy(micro_batch_size=3))
