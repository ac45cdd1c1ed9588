"""Deep networks in 16 bits, whose kernels round differently for fewer rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.trials import examination
from lightning_unified.step.exactness.trials.judge import Judge
from lightning_unified.step.exactness.trials.rounding import nudged
from lightning_unified.step.exactness.trials.trial_runs import TrialRuns
from tests.support.modules.plain import fit
from tests.support.modules.split import Net, found

WIDTH, DEPTH = 64, 24


class _Adapted(nn.Module):
    """A frozen bfloat16 layer with a trained low-rank product.

    Its kernel adds in an order that depends on the number of rows.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16() * 0.7 / WIDTH**0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) * 0.1)

    def forward(self, x):
        parts = 1 + len(x) % 5
        split = zip(x.tensor_split(parts, -1), self.weight.tensor_split(parts, -1), strict=True)
        frozen = sum((F.linear(one, weight) for one, weight in split), torch.zeros((), dtype=x.dtype))
        return x + torch.tanh(frozen + F.linear(F.linear(x.float(), self.down), self.up).to(x.dtype))


class Deep(Net):
    """Many such layers; the head and the adapters are trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, WIDTH), *[_Adapted() for _ in range(DEPTH)], nn.Linear(WIDTH, 4))

    def training_step(self, batch, batch_idx):
        x = self.net[0](batch["x"].float()).bfloat16()
        for layer in self.net[1:-1]:
            x = layer(x)
        return self.loss(self.net[-1](x.float()), batch)


class DeepContrastive(Deep):
    """Compares rows, so that micro-batches give another gradient."""

    def loss(self, out, batch):
        return F.cross_entropy(out @ out.detach().T / 0.2, torch.arange(len(out)))


class Fitted(Net):
    """Fits its own exact outputs.

    From the fourth batch on they lie `apart`, and the loss is little more than rounding. The float32 layers add in an order that depends on
    the number of rows. Nothing is learnt, so that this stays so.
    """

    apart = 0.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.exact = [layer.weight.detach().double() for layer in self.net]

    def training_step(self, batch, batch_idx):
        x, exact = batch["x"], batch["x"].double()
        parts = 1 + len(x) % 5
        for layer, weight in zip(self.net, self.exact, strict=True):
            split = zip(x.tensor_split(parts, -1), layer.weight.tensor_split(parts, -1), strict=True)
            x = torch.sin(3 * sum((F.linear(*one) for one in split), torch.zeros(())))
            exact = torch.sin(3 * F.linear(exact, weight))
        return self.loss(x - exact.float() - batch["y"], batch)

    def loss(self, out, batch):
        return out.pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.0)

    @classmethod
    def loader(cls, dtype):
        torch.manual_seed(1)
        rows = [
            {"x": torch.randn(WIDTH, dtype=dtype), "y": torch.tensor(1.0 if row < 24 else cls.apart)}
            for row in range(80)
        ]
        return DataLoader([row | {"y": row["y"].expand(WIDTH)} for row in rows], batch_size=8)


class Close(Fitted):
    apart = 1e-3


class LateContrastive(Fitted):
    """Compares rows from the fourth batch on."""

    def loss(self, out, batch):
        moved = out + batch["x"]
        return out.pow(2).mean() if batch["y"].eq(1).all() else (moved - moved.mean(0)).pow(2).mean()


class Chosen(Fitted):
    """Rounding chooses which gradient a row has: the last bit of a weight stands for it."""

    apart = 0.5

    def __init__(self):
        super().__init__()
        self.bit = self.last_bit()

    def last_bit(self):
        return int(self.net[0].weight.detach()[0, 0].view(torch.int32) % 2)

    def chooses(self):
        return self.last_bit() == self.bit

    def loss(self, out, batch):
        is_late = not batch["y"].eq(1).all()
        return (out + (out - out.detach()) * len(out) if is_late and self.chooses() else out).pow(2).mean()


class ChosenAlways(Chosen):
    def chooses(self):
        return True


class _Shift(torch.autograd.Function):
    """Adds its gradient to a large number, so that it is rounded as in a long sum of entries."""

    @staticmethod
    def forward(ctx, x, shift):
        return x + shift

    @staticmethod
    def backward(ctx, gradient):
        return gradient, (gradient.sum() + 1e5) - 1e5


class Shifted(Net):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def loss(self, out, batch):
        return (_Shift.apply(out, self.shift).mean(1) - 3).square().mean()


class ShiftedContrastive(Shifted):
    """Also compares rows, which is a small part of its gradient."""

    def loss(self, out, batch):
        return super().loss(out, batch) + 0.02 * (out - out.mean(0)).abs().mean()


def trained(kind):
    module = kind()
    loader = kind.loader(dtype=torch.float32)
    strategy = UnifiedStrategy(micro_batch_size=3)
    fit(module, loader, strategy=strategy, precision="32-true", max_epochs=1)
    return strategy


def test_rounding_of_a_deep_network_is_measured_before_a_refusal(monkeypatch):
    measured = []
    whole = TrialRuns.rounding
    monkeypatch.setattr(TrialRuns, "rounding", lambda *args: measured.append(whole(*args)) or measured[-1])

    strategy = trained(Deep)

    assert measured, "the constant tolerance held, so that this test shows nothing"
    assert all(one > 1 for one in measured)
    assert "gradients of 8 rows" in found(strategy)


@pytest.mark.parametrize("kind", [Fitted, Close])
def test_a_loss_that_vanishes_in_float32_is_no_reason_to_refuse(kind, monkeypatch):
    assert "rows" in found(trained(kind))

    monkeypatch.setattr(TrialRuns, "rounding", lambda *_: 0.0)
    monkeypatch.setattr(examination, "has_room", lambda *_: False)
    with pytest.raises(SplitError, match="cannot be split exactly"):
        trained(kind)


def test_a_late_refusal_stands_with_weights_moved_by_one_rounding_step(monkeypatch):
    monkeypatch.setattr(TrialRuns, "rounding", lambda *_: 0.0)  # it tells how far whole batches move, and not each row
    assert "rows" in found(trained(Chosen))
    with pytest.raises(SplitError, match="cannot be split exactly"):
        trained(ChosenAlways)

    monkeypatch.setattr(Judge, "_agrees_nudged", lambda *_: False)
    with pytest.raises(SplitError, match="cannot be split exactly"):
        trained(Chosen)


@pytest.mark.parametrize("kind", [DeepContrastive, LateContrastive])
def test_a_loss_that_cannot_be_split_is_refused_in_spite_of_rounding(kind):
    with pytest.raises(SplitError, match="cannot be split exactly"):
        trained(kind)


def test_a_kernel_that_rounds_coarsely_is_no_reason_to_refuse(monkeypatch):
    assert "rows" in found(trained(Shifted))
    with pytest.raises(SplitError, match="cannot be split exactly"):
        trained(ShiftedContrastive)

    monkeypatch.setattr(examination, "has_room", lambda *_: False)
    with pytest.raises(SplitError, match="cannot be split exactly"):
        trained(Shifted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_nudge_moves_parameters_by_one_rounding_step_and_goes_back(dtype):
    parameters = [nn.Parameter(torch.randn(33, 7).to(dtype)), nn.Parameter(torch.randn(5).to(dtype))]
    before = [one.detach().clone() for one in parameters]
    lowest = torch.bfloat16 if dtype is torch.float32 else dtype

    with nudged(parameters, lowest) as has_changed:
        shares = [((one.detach() - old) / old).abs().float() for one, old in zip(parameters, before, strict=True)]
    assert has_changed
    assert all(share.gt(0).all() and share.le(torch.finfo(lowest).eps).all() for share in shares)
    assert all(torch.equal(one, old) for one, old in zip(parameters, before, strict=True))


def test_integers_and_doubles_are_not_nudged():
    parameters = [nn.Parameter(torch.ones(3, dtype=torch.float64)), torch.ones(3, dtype=torch.int32)]
    with nudged(parameters, torch.bfloat16) as has_changed:
        assert not has_changed
        assert all(one.eq(1).all() for one in parameters)
