"""Gradients of tensors that only the module or only the optimizer has, or neither.

No `zero_grad` drops those of tensors beside the optimizer, and users read them in hooks.
"""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.step.policy import notices
from tests.support.modules.plain import MLP, fit, weights
from tests.support.runs.recovering import Fails


class Logs(L.LightningModule):
    """Logs `figure()` after each backward pass."""

    def __init__(self):
        super().__init__()
        self.net, self.figures = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)), []

    def shifted(self, x):
        return x

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(self.shifted(batch["x"])), batch["y"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.figures.append(float(self.figure()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), 0.1)


class Unfrozen(Logs):
    """Trains the last layer only, and freezes nothing: the first layer's gradient grows from batch to batch."""

    def figure(self):
        return self.net[0].weight.grad.norm()


class Frozen(Logs):
    """Trains the last layer only, and freezes the first."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def figure(self):
        return self.net[2].weight.grad.norm()


class OwnBackward(Unfrozen):
    def backward(self, loss, *args, **kwargs):
        loss.backward()


class Perturbed(Logs):
    """Adds a tensor to every row, and moves it along its gradient."""

    def __init__(self):
        super().__init__()
        self.shift = torch.zeros(6, dtype=torch.float64, requires_grad=True)

    def shifted(self, x):
        return x + self.shift

    def on_after_backward(self):
        with torch.no_grad():
            self.shift += 0.1 * self.shift.grad
        self.shift.grad = None

    def figure(self):
        return self.shift.detach().norm()


class Hidden(Logs):
    """Trains a layer in a list with its own optimizer, whose step runs in a hook."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(6, 6, dtype=torch.float64)]
        self.own = torch.optim.SGD(self.hidden[0].parameters(), 0.1)

    def shifted(self, x):
        return self.hidden[0](x)

    def on_before_zero_grad(self, optimizer):
        self.own.step()
        self.own.zero_grad()

    def figure(self):
        return self.hidden[0].weight.detach().norm()


class Optimized(Logs):
    """Gives the optimizer a tensor that is no parameter of the module, and has its own `backward`."""

    def __init__(self):
        super().__init__()
        self.shift = torch.zeros(6, dtype=torch.float64, requires_grad=True)

    def shifted(self, x):
        return x + self.shift

    def backward(self, loss, *args, **kwargs):
        loss.backward()

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), self.shift], 0.1, momentum=0.9)

    def figure(self):
        return self.shift.detach().norm()


class Differentiates(Optimized):
    """Runs a backward pass in its step, and drops the gradient."""

    def shifted(self, x):
        self.net(x + self.shift).square().mean().backward(inputs=[self.shift])
        self.shift.grad = None
        return super().shifted(x)


def run(kind, strategy, *callbacks):
    torch.manual_seed(0)
    module = kind().double()
    fit(module, MLP.loader(), strategy=strategy, callbacks=list(callbacks))
    return module


@pytest.mark.parametrize("kind", [Unfrozen, OwnBackward, Perturbed, Hidden, Optimized, Differentiates])
@pytest.mark.parametrize("phase", [None, "backward", "forward"])
def test_other_gradients_are_those_of_whole_batches(kind, phase):
    failing = () if phase is None else (Fails(phase, batch=1), Fails(phase))
    split = run(kind, UnifiedStrategy(micro_batch_size=8 if phase else 3), *failing)
    plain = run(kind, "auto")

    assert all(one.raised == 1 for one in failing)
    assert split.figures == pytest.approx(plain.figures, rel=1e-9)
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("failing", [(), (Fails("backward"),)])
def test_every_micro_batch_finds_the_gradients_of_the_batch_before(failing):
    class Drops(Perturbed):
        def training_step(self, batch, batch_idx):
            if batch_idx:
                self.shift.grad.zero_()
            return super().training_step(batch, batch_idx)

        def on_after_backward(self):
            with torch.no_grad():
                self.shift += 0.1 * self.shift.grad

        def on_train_epoch_end(self):
            self.shift.grad = None

    split, plain = run(Drops, UnifiedStrategy(micro_batch_size=3), *failing), run(Drops, "auto")

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)


def test_large_gradients_that_are_copied_in_every_step_are_said(monkeypatch):
    monkeypatch.setattr(notices, "_MUCH", 2 * 6 * 16)
    said = []
    for kind in (Unfrozen, Frozen):
        strategy = UnifiedStrategy(predict=False)
        run(kind, strategy)
        said.append([event for event in strategy.events if "copied in every step" in event])

    assert len(said[0]) == 1 and "requires_grad_(False)" in said[0][0]
    assert not said[1]
