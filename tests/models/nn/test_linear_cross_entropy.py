"""The chunked loss against torch's plain one."""

import pytest
import torch
from torch.nn import functional

from lightning_unified.nn import linear_cross_entropy as subject
from lightning_unified.nn.cross_entropy.chunks import Chunks, losses_of_rows, summed_loss
from lightning_unified.nn.cross_entropy.kernels import Eager
from lightning_unified.nn.linear_cross_entropy import chunk_rows_for, linear_cross_entropy
from tests.support.lanes import first_cells


def _problem(*, dtype=torch.float64, bias=True):
    hidden = torch.randn(3, 17, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(37, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 37, (3, 17))
    labels[:, ::4] = -100
    return hidden, weight, torch.randn(37, dtype=dtype, requires_grad=True) if bias else None, labels


def _plain(hidden, weight, bias, labels, reduction):
    return functional.cross_entropy(
        functional.linear(hidden, weight, bias).flatten(0, 1), labels.flatten(), reduction=reduction
    )


@pytest.fixture(params=["torch's, large weight", "torch's, small weight", "own"])
def path(request, monkeypatch):
    """All implementations: torch's operator if it exists, and the function for other versions."""
    if request.param == "own":
        monkeypatch.setattr(subject, "_torch_does_it", lambda hidden: False)
    if request.param == "torch's, large weight":
        monkeypatch.setattr(subject, "_CHUNK_BYTES", 64 * 37)
    return request.param


@first_cells(1, "reduction", ["sum", "mean"])
@pytest.mark.parametrize("rows", [1, 7, 16, 51, 1000, None])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_equal_plain_cross_entropy(path, reduction, rows, bias):
    hidden, weight, b, labels = _problem(bias=bias)
    inputs = [hidden, weight, b] if bias else [hidden, weight]
    expected = _plain(hidden, weight, b, labels, reduction)
    actual = linear_cross_entropy(hidden, weight=weight, bias=b, labels=labels, reduction=reduction, chunk_rows=rows)

    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    scale = torch.tensor(1.7, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(actual * scale, inputs), torch.autograd.grad(expected * scale, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("rows", [7, None])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_transform_is_applied_to_each_chunk(path, reduction, rows, frozen):
    hidden, weight, b, labels = _problem()
    if frozen:
        weight, b = weight.detach(), b.detach()
    inputs = [hidden] if frozen else [hidden, weight, b]
    capped = 2 * torch.tanh(functional.linear(hidden, weight, b).flatten(0, 1) / 2)
    expected = functional.cross_entropy(capped, labels.flatten(), reduction=reduction)
    actual = linear_cross_entropy(
        hidden,
        weight=weight,
        bias=b,
        labels=labels,
        reduction=reduction,
        chunk_rows=rows,
        transform=lambda logits: 2 * torch.tanh(logits / 2),
    )
    outer = torch.rand(expected.shape, dtype=torch.float64)

    torch.testing.assert_close(actual.flatten(), expected.flatten(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad((actual.view(expected.shape) * outer).sum(), inputs),
        torch.autograd.grad((expected * outer).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_losses_one_by_one_equal_plain_ones_and_so_do_gradients_of_any_weights(path):
    hidden, weight, b, labels = _problem()
    outer = torch.rand(3, 17, dtype=torch.float64)
    expected = _plain(hidden, weight, b, labels, "none").view(3, 17)
    actual = linear_cross_entropy(hidden, weight=weight, bias=b, labels=labels, reduction="none", chunk_rows=7)

    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad((actual * outer).sum(), [hidden, weight, b]),
        torch.autograd.grad((expected * outer).sum(), [hidden, weight, b]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_second_backward_pass_gives_the_same_gradient(path):
    hidden, weight, _, labels = _problem(bias=False)
    loss = linear_cross_entropy(hidden, weight=weight, labels=labels)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()
    torch.testing.assert_close(first, torch.autograd.grad(loss, weight)[0], rtol=1e-12, atol=1e-12)


def test_a_sum_over_no_scored_label_is_zero_with_zero_gradients(path):
    hidden, weight, _, labels = _problem(bias=False)
    loss = linear_cross_entropy(hidden, weight=weight, labels=torch.full_like(labels, -100), reduction="sum")
    gradients = torch.autograd.grad(loss, [hidden, weight])

    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in gradients)


def test_a_mean_over_no_scored_label_is_nan_as_in_torch(path):
    hidden, weight, _, labels = _problem(bias=False)
    assert linear_cross_entropy(hidden, weight=weight, labels=torch.full_like(labels, -100)).isnan()


@first_cells(1, "loss", [losses_of_rows, summed_loss])
def test_the_own_functions_pass_gradcheck(loss):
    hidden, weight, bias, labels = _problem()
    how = {"labels": labels.flatten(), "rows": 16, "dtype": torch.float64, "kernels": Eager()}
    assert torch.autograd.gradcheck(
        lambda h, w, b: loss(Chunks(hidden=h, weight=w, bias=b, **how)), (hidden.flatten(0, 1), weight, bias)
    )


@pytest.mark.parametrize(("chunk_rows", "products"), [(None, 1), (1024, 1), (64, 2)])
def test_only_a_small_chosen_chunk_computes_the_logits_twice(monkeypatch, chunk_rows, products):
    monkeypatch.setattr(subject, "_torch_does_it", lambda hidden: False)
    hidden, weight, _, labels = _problem(bias=False)
    calls = []
    plain = functional.linear
    monkeypatch.setattr(functional, "linear", lambda *operands: calls.append(1) or plain(*operands))
    linear_cross_entropy(hidden, weight=weight, labels=labels, reduction="sum", chunk_rows=chunk_rows).backward()

    assert len(calls) == products


def test_a_loss_without_gradients_computes_none(monkeypatch):
    monkeypatch.setattr(subject, "_torch_does_it", lambda hidden: False)
    monkeypatch.setattr(Eager, "losses_and_gradient", None)
    hidden, weight, bias, labels = _problem()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight=weight, bias=bias, labels=labels)

    torch.testing.assert_close(loss, _plain(hidden, weight, bias, labels, "mean"))


def test_under_autocast_the_products_run_in_bf16_and_the_loss_stays_fp32():
    hidden, weight, _, labels = _problem(dtype=torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight=weight, labels=labels, chunk_rows=16)
        logits = functional.linear(hidden, weight)
        theirs = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours_grad, theirs_grad = (torch.autograd.grad(loss, weight)[0] for loss in (ours, theirs))
    assert ours_grad.dtype == torch.float32
    assert (ours_grad - theirs_grad).norm() / theirs_grad.norm() < 2**-6  # a few roundings of bf16 (2**-9)


def test_the_logits_never_exist_at_once(path):
    widest = 0

    class Widest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal widest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(value, torch.Tensor):
                    widest = max(widest, value.numel())
            return out

    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    with Widest():
        linear_cross_entropy(hidden, weight=weight, labels=torch.zeros(64, dtype=torch.int64), chunk_rows=8).backward()

    assert widest < 64 * 512


@pytest.mark.parametrize(("classes", "rows"), [(32_000, 128), (150_000, 16), (2_000_000, 16), (257, 8192), (2, 8192)])
def test_a_chunk_is_a_power_of_two_of_at_most_16_mib_between_16_and_8192_rows(classes, rows):
    assert chunk_rows_for(classes) == rows


def test_a_large_batch_has_no_more_than_64_chunks():
    assert chunk_rows_for(32_000, rows=64 * 128) == 128
    assert chunk_rows_for(32_000, rows=64 * 128 + 1) == 129
    assert chunk_rows_for(32_000, rows=2**20) == 2**14


def test_a_fused_chunk_has_at_most_512_mib_of_logits():
    assert chunk_rows_for(50_304, logit_bytes=2) == 4096
    assert chunk_rows_for(151_936, logit_bytes=2) == 1024
    assert chunk_rows_for(50_304, logit_bytes=4) == 2048


def test_an_unknown_reduction_is_refused():
    hidden, weight, _, labels = _problem(bias=False)
    with pytest.raises(ValueError, match="choose 'none', 'sum' or 'mean'"):
        linear_cross_entropy(hidden, weight=weight, labels=labels, reduction="total")


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, _, labels = _problem(bias=False)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight=weight, labels=labels[:2])


def test_a_chunk_of_no_rows_is_refused():
    hidden, weight, _, labels = _problem(bias=False)
    with pytest.raises(ValueError, match="1 or more"):
        linear_cross_entropy(hidden, weight=weight, labels=labels, chunk_rows=0)
