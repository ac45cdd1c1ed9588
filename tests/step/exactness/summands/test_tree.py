"""The summands of a loss, read from its graph, and factors of their gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_unified.step.exactness.losses.summands import REST, StepSummands, scale_summands


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 3).double(), nn.Linear(4, 2, bias=False).double()
        self.scale = nn.Parameter(torch.zeros(()).double())


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, -100, 2, -100, 1])


def summands(net, loss):
    reader = StepSummands(net)
    with reader.noting():
        found = loss(net)
    return found, reader.of(found)


LOSSES = {
    "two means": lambda net: F.cross_entropy(net.one(X), Y) + 0.1 * net.two(X).square().mean(),
    "smoothed labels": lambda net: F.cross_entropy(net.one(X), Y, label_smoothing=0.1) + net.two(X).square().mean(),
    "a difference": lambda net: 3 - net.one(X).mean() - net.two(X).mean() / 2,
    "a stack": lambda net: (torch.stack([net.one(X).mean(), net.two(X).mean()]) * torch.tensor([1.0, 0.2])).sum(),
    "a list": lambda net: sum([net.one(X).mean(), net.two(X).mean()]),
    "a cast": lambda net: (net.one(X).mean() + net.two(X).mean().float()).double() * 2,
    "in place": lambda net: net.one(X).mean().add_(net.two(X).mean(), alpha=0.5),
}
KEYS = {"two means": ["NllLoss of one", "Mean of two"], "smoothed labels": ["Add of one", "Mean of two"]}


@pytest.mark.parametrize("name", LOSSES)
def test_the_values_of_summands_add_up_to_the_loss(name):
    torch.manual_seed(0)
    loss, found = summands(Net(), LOSSES[name])

    assert [one.key for one in found] == [*KEYS.get(name, ["Mean of one", "Mean of two"]), REST]
    assert float(sum(one.value for one in found)) == pytest.approx(float(loss), rel=1e-6)
    assert float(found[-1].value) == pytest.approx(0.0, abs=1e-6)


def test_a_summand_that_is_multiplied_by_the_number_0_says_so():
    _, found = summands(Net(), lambda net: net.one(X).mean() + 0.5 * (0 * net.two(X).mean()) + net.two(X).sum() / 3)

    assert [(one.key, one.is_zero) for one in found[:-1]] == [
        ("Mean of one", False),
        ("Mean of two", True),
        ("Sum of two", False),
    ]


class _Counting(TorchDispatchMode):
    """Sees each operation, as a simulated machine does: it gets numbers in place of tensors made of them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LOSSES)
def test_summands_are_the_same_in_a_dispatch_mode(name):
    torch.manual_seed(0)
    net = Net()
    _, expected = summands(net, lambda net: LOSSES[name](net) / 2)
    with _Counting():
        _, found = summands(net, lambda net: LOSSES[name](net) / 2)

    assert [one.key for one in found] == [one.key for one in expected]
    assert [float(one.value) for one in found] == [float(one.value) for one in expected]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.0, 1.0), (0.3, 0.7)])
def test_each_summands_gradient_gets_its_own_factor(name, factors):
    torch.manual_seed(0)
    net = Net()
    loss, _ = summands(net, LOSSES[name])
    loss.backward()
    whole = [one.grad.clone() for one in (net.one.weight, net.two.weight)]
    net.zero_grad()
    loss, found = summands(net, LOSSES[name])
    scale_summands(found, [*factors, 1.0])
    loss.backward()

    torch.testing.assert_close(net.one.weight.grad, factors[0] * whole[0])
    torch.testing.assert_close(net.two.weight.grad, factors[1] * whole[1])


def test_penalties_of_parameters_are_one_summand():
    def loss(net):
        penalty = sum(one.square().sum() for one in net.parameters())
        return net.one(X).mean() + 0.1 * penalty + torch.exp(-net.scale) * net.two(X).mean() + net.scale

    net = Net()
    _, found = summands(net, loss)

    assert [one.key for one in found] == ["Mean of one", "Mul of scale", "penalties of parameters", REST]
    assert len(found[2].places) == 5


def test_no_gradient_leaves_a_summand_without_terms():
    def loss(net):
        hidden = net.one(X).tanh()
        nothing = (hidden.square().mean(1) * torch.zeros(6)).sum() / torch.zeros(6).sum()
        return nothing + hidden.mean()

    net = Net()
    total, found = summands(net, loss)
    scale_summands(found, [0.0, 1.0, 1.0])
    total.backward()

    assert total.isnan()
    assert net.one.weight.grad.isfinite().all()
    assert net.one.weight.grad.any()


def test_alike_summands_are_numbered():
    _, found = summands(Net(), lambda net: net.one(X).mean() + net.one(2 * X).mean())

    assert [one.key for one in found] == ["Mean of one", "Mean of one (2)", REST]


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(6, 3)


def test_one_value_that_nothing_notes_is_the_rest_of_the_loss():
    _, found = summands(Net(), lambda net: Own.apply(net.one(X)) + net.two(X).mean())

    assert len(found) == 2


def test_two_values_that_nothing_notes_are_one_summand():
    _, found = summands(Net(), lambda net: Own.apply(net.one(X)) + Own.apply(net.one(2 * X)))

    assert [one.key for one in found] == ["Add of one", REST]


def test_a_loss_of_smoothed_labels_is_one_summand():
    _, found = summands(Net(), lambda net: F.cross_entropy(net.one(X), Y, label_smoothing=0.1))

    assert [one.key for one in found] == ["Add of one", REST]


@pytest.mark.parametrize("weigh", [lambda w, one: torch.exp(-w[1]) * one, lambda w, one: one / (2 * w[0].exp() ** 2)])
def test_a_trained_weight_hides_no_divisor(weigh):
    net = Net()
    net.weights = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    _, found = summands(net, lambda net: weigh(net.weights, net.one(X)[:5].sum() / 5) + net.two(X).mean())

    assert {float(one.divisor) for one in found[:1]} == {5.0}


def test_divisors_are_read_from_the_graph():
    mask = torch.tensor([1.0, 0, 0, 1, 1, 0]).double()
    _, found = summands(
        Net(),
        lambda net: (
            F.cross_entropy(net.one(X), Y) + (net.two(X).mean(1) * mask).sum() / mask.sum() + net.one(X)[:2].mean()
        ),
    )

    assert [float(one.divisor) for one in found[:3]] == [4.0, 3.0, 6.0]
