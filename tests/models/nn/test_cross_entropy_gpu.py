"""Fused kernels of the chunked loss on a GPU, against float64."""

import pytest
import torch
from torch.nn import functional

from lightning_unified.nn.cross_entropy import kernels
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.gpu


def problem(rows=70, classes=5003):
    torch.manual_seed(0)
    hidden = torch.randn(rows, 64, device="cuda", requires_grad=True)
    weight = (torch.randn(classes, 64, device="cuda") * 0.3).requires_grad_()
    bias = torch.randn(classes, device="cuda", requires_grad=True)
    labels = torch.randint(0, classes, (rows,), device="cuda")
    labels[::5] = -100
    return hidden, weight, bias, labels


def exact(hidden, weight, bias, labels, reduction):
    """Return loss and gradients in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    loss = functional.cross_entropy(functional.linear(*wide), labels, reduction=reduction)
    return loss, torch.autograd.grad(loss, wide)


def error(ours, exact):
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("chunk", [16, 64, None])
@pytest.mark.parametrize(("dtype", "most"), [(None, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_loss_and_gradients_are_float64s_up_to_the_dtype(reduction, chunk, dtype, most):
    hidden, weight, bias, labels = problem()
    loss, gradients = exact(hidden, weight, bias, labels, reduction)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        ours = linear_cross_entropy(
            hidden, weight=weight, bias=bias, labels=labels, reduction=reduction, chunk_rows=chunk
        )

    assert ours.dtype == torch.float32
    assert error(ours, loss) < most
    for mine, theirs in zip(torch.autograd.grad(ours, [hidden, weight, bias]), gradients, strict=True):
        assert error(mine, theirs) < most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_no_further_from_float64_than_those_of_torchs_operators(monkeypatch, dtype):
    hidden, weight, bias, labels = problem(rows=1024)
    _, gradients = exact(hidden, weight, bias, labels, "mean")
    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(kernels, "fused_on", lambda device: False)
        with torch.autocast("cuda", dtype):
            loss = linear_cross_entropy(hidden, weight=weight, bias=bias, labels=labels, chunk_rows=64)
        found.append(
            [error(*pair) for pair in zip(torch.autograd.grad(loss, [hidden, weight, bias]), gradients, strict=True)]
        )

    for ours, torchs in zip(*found, strict=True):
        assert ours < 1.05 * torchs


def test_each_row_has_its_own_weight():
    hidden, weight, bias, labels = problem()
    outer = torch.rand(len(labels), device="cuda")
    ours = linear_cross_entropy(hidden, weight=weight, bias=bias, labels=labels, reduction="none", chunk_rows=16)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    plain = functional.cross_entropy(functional.linear(*wide), labels, reduction="none")

    torch.testing.assert_close(ours.double(), plain, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(
        torch.autograd.grad((ours * outer).sum(), [hidden, weight, bias]),
        torch.autograd.grad((plain * outer).sum(), wide),
        strict=True,
    ):
        assert error(mine, theirs) < 1e-5


def test_a_second_backward_pass_gives_the_same_gradient():
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy(hidden, weight=weight, labels=labels, chunk_rows=16)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()

    assert torch.equal(first, torch.autograd.grad(loss, weight)[0])


def test_logits_of_infinity_give_a_loss_that_is_not_finite():
    hidden, weight, _, labels = problem()
    with torch.no_grad():
        hidden[1] = float("inf")

    assert not linear_cross_entropy(hidden, weight=weight, labels=labels).isfinite()


def test_a_compiled_loss_is_the_eager_one():
    hidden, weight, _, labels = problem()

    def loss(hidden):
        return linear_cross_entropy(hidden, weight=weight, labels=labels, chunk_rows=32)

    eager, compiled = loss(hidden), torch.compile(loss)(hidden)

    torch.testing.assert_close(compiled, eager)
    mine, theirs = (torch.autograd.grad(value, [hidden, weight]) for value in (compiled, eager))
    torch.testing.assert_close(mine, theirs)


def test_no_memory_of_the_weights_size_but_its_gradient_is_taken():
    hidden, weight, _, labels = problem(rows=64, classes=200_003)
    linear_cross_entropy(hidden, weight=weight, labels=labels, chunk_rows=16).backward()
    weight.grad = hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight=weight, labels=labels, chunk_rows=16).backward()
    chunk = 16 * 200_003 * 4

    assert torch.cuda.max_memory_allocated() - before < weight.nbytes + 1.5 * chunk
