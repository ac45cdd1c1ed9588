"""Trained parameters that a step moves from where they are, whether its loss uses them or not.

Each micro-batch would move them once more. Frozen ones are state, which is merged.
"""

import copy

import pytest
import torch
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.modules.plain import fit, weights
from tests.support.modules.step_kinds import Kind

MOVES = r"writes .* in its step, in another way each time that the step runs"


class Averages(Kind):
    """Moves an average towards its weights, and leaves it unfrozen."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.move()
        return loss

    def move(self):
        for average, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
            average.data = average.data * 0.9 + weight.data * 0.1


class AveragesInPlace(Averages):
    """Writes the average in place."""

    @torch.no_grad()
    def move(self):
        for average, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
            average.lerp_(weight, 0.1)


class SlowTeacher(AveragesInPlace):
    """Learns from a slow average, which it moves first; its gradients agree within the tolerance of float32."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for average, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
                average.lerp_(weight, 5e-4)
            target = self.average(batch["x"])
        return Kind.training_step(self, batch, batch_idx) + F.mse_loss(self.net(batch["x"]), target)


class Decays(Kind):
    """Decays its weights before it uses them."""

    def loss(self, batch):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99998)
        return super().loss(batch)


class SetsUnused(Kind):
    """Sets a trained parameter that its loss does not use, to a figure of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.center = torch.nn.Parameter(torch.zeros(6))

    def training_step(self, batch, batch_idx):
        self.center.data = batch["x"].mean(0)
        return super().training_step(batch, batch_idx)


class AveragesOfFrozen(Averages):
    """Freezes its average."""

    def __init__(self) -> None:
        super().__init__()
        self.average.requires_grad_(False)


class NotOptimized(Averages):
    """Leaves its average to no optimizer."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)


class NormalizesUnused(Kind):
    """Normalizes a trained parameter that its loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = torch.nn.Parameter(torch.randn(20, 6))

    def training_step(self, batch, batch_idx):
        self.prototypes.data = F.normalize(self.prototypes.data, dim=1)
        return super().training_step(batch, batch_idx)


class NormalizesAlmost(NormalizesUnused):
    """Normalizes prototypes that it uses, with a small number that keeps the norm off 0."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.prototypes.div_(self.prototypes.norm() + 1e-8)
        return Kind.training_step(self, batch, batch_idx) + (batch["x"] @ self.prototypes.T).square().mean()


def trained(kind, strategy="auto", dtype=torch.float64):
    torch.manual_seed(0)
    module = kind().to(dtype)
    fit(module, kind.loader(), strategy=strategy, max_epochs=2)
    return weights(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [Averages, AveragesInPlace, SlowTeacher, Decays, SetsUnused])
def test_a_trained_parameter_that_the_step_moves_is_refused(kind, dtype):
    with pytest.raises(SplitError, match=MOVES):
        trained(kind, UnifiedStrategy(micro_batch_size=3), dtype)


@pytest.mark.parametrize("kind", [AveragesOfFrozen, NotOptimized, NormalizesUnused])
def test_state_and_projections_are_split(kind):
    torch.testing.assert_close(
        trained(kind, UnifiedStrategy(micro_batch_size=3)), trained(kind), rtol=1e-10, atol=1e-12
    )


def test_a_projection_that_is_off_by_its_small_number_is_split():
    torch.testing.assert_close(
        trained(NormalizesAlmost, UnifiedStrategy(micro_batch_size=3)), trained(NormalizesAlmost), rtol=1e-6, atol=1e-8
    )
