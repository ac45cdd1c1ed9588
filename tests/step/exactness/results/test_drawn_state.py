"""State that random draws alone decide: each micro-batch's draw is as good as the whole batch's."""

import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.tables import Tables
from tests.support.modules.plain import fit
from tests.support.modules.writing import Writes


class BayesianLayer(nn.Module):
    """Adds noise to its weights, and keeps their divergence from the prior for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.linspace(-1, 1, 24).reshape(4, 6))
        self.divergence = torch.zeros(())

    def forward(self, x):
        noise = torch.randn_like(self.mean)
        self.divergence = ((self.mean + 0.1 * noise) ** 2 - noise**2).sum()
        return x @ (self.mean + 0.1 * noise).T


class Bayesian(Writes):
    def __init__(self):
        super().__init__()
        self.net = BayesianLayer()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"]), batch["y"]) + 1e-3 * self.net.divergence


class MixesByDraw(Writes):
    """Keeps the random share by which the step scales its outputs."""

    share = 0.0

    def training_step(self, batch, batch_idx):
        self.share = float(torch.rand(()))
        return F.cross_entropy(self.net(batch["x"]) * (1 + self.share), batch["y"])


class DrawnFlag(Writes):
    """Keeps a flag of the noise; in another step it might follow the rows."""

    is_large = False

    def training_step(self, batch, batch_idx):
        noise = torch.rand(())
        self.is_large = bool(noise > 0.5)
        return F.cross_entropy(self.net(batch["x"]) * (1 + noise), batch["y"])


class NoisyScale(Writes):
    """Keeps a standard deviation over rows, with noise."""

    scale = 1.0

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"]) * (1 + torch.rand(()))
        self.scale = float(out.detach().std())
        return F.cross_entropy(out, batch["y"])


class Shares(L.Callback):
    """Records the share that the module keeps after each batch."""

    def __init__(self) -> None:
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(pl_module.share)


def train(module, **options):
    strategy = UnifiedStrategy(micro_batch_size=3)
    fit(module.double(), module.loader(), strategy=strategy, **options)
    return strategy


def test_a_bayesian_layer_keeps_the_last_micro_batchs_draw():
    torch.manual_seed(0)
    module = Bayesian()
    strategy = train(module)

    assert any("Bayesian.net.divergence, which random draws decide" in event for event in strategy.events)
    assert float(module.net.divergence.detach()) != 0.0


def test_a_drawn_number_is_one_draw_and_not_a_mean_of_draws():
    torch.manual_seed(0)
    module, kept = MixesByDraw(), Shares()
    drawn = []
    rand = torch.rand

    def noted(*args, **kwargs):
        drawn.append(rand(*args, **kwargs))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", noted)
        train(module, callbacks=[kept])

    assert len(kept.values) > 1
    assert {*kept.values} <= {float(one) for one in drawn}


def test_state_of_rows_and_noise_is_refused():
    torch.manual_seed(0)

    with pytest.raises(SplitError, match=r"writes NoisyScale\.scale"):
        train(NoisyScale())


def test_a_flag_that_micro_batches_set_otherwise_is_refused():
    torch.manual_seed(0)

    with pytest.raises(SplitError, match=r"writes DrawnFlag\.is_large"):
        train(DrawnFlag())


def test_a_loss_that_is_kept_with_its_graph_gives_no_warning():
    class KeepsLoss(Writes):
        def training_step(self, batch, batch_idx):
            self.last = F.cross_entropy(self.net(batch["x"]), batch["y"])
            return self.last

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Converting a tensor with requires_grad")
        train(KeepsLoss())


def test_drawn_state_is_in_checkpoints():
    tables = Tables()
    tables.written.drawn.add("Net.noise")
    tables.redrawn.add("Net.noise")
    again = Tables()
    again.load_state_dict(tables.state_dict())

    assert (again.written.drawn, again.redrawn) == ({"Net.noise"}, {"Net.noise"})
