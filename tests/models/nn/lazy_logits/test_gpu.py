"""Lazy logits on a GPU: fused kernels give the losses and gradients of all logits."""

import copy

import pytest
import torch

from lightning_unified.nn.cross_entropy import kernels
from lightning_unified.nn.lazy_logits import LazyHeads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

pytest.importorskip("transformers")

from tests.support.causal_lms import causal_lm  # noqa: E402


def gradients(model, ids, *, autocast):
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(("family", "is_fused"), [("Llama", True), ("Gemma2", False), ("Cohere", True)])
def test_gradients_are_no_further_from_float64_than_those_of_all_logits(monkeypatch, family, is_fused, is_frozen):
    exact = causal_lm(family).cuda()
    if is_frozen:
        exact.get_output_embeddings().weight.requires_grad_(False)
    plain, chunked = (copy.deepcopy(exact).float() for _ in range(2))
    ids = torch.randint(3, 67, (3, 11), device="cuda")
    calls = []
    for name in ("losses", "losses_and_gradient"):  # with a frozen head, the forward pass computes the gradient too
        original = getattr(kernels.Fused, name)
        monkeypatch.setattr(kernels.Fused, name, lambda *args, call=original: calls.append(1) or call(*args))
    heads = LazyHeads(chunked, 16)
    _, theirs = gradients(exact, ids, autocast=False)
    (one, alls), (other, chunks) = gradients(plain, ids, autocast=True), gradients(chunked, ids, autocast=True)
    heads.remove()

    assert len(calls) == (3 if is_fused else 0)
    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
    assert chunks.keys() == alls.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = [float((found[name].double() - gradient).norm() / gradient.norm()) for found in (chunks, alls)]
        assert error[0] < 1.2 * error[1] + 2**-8
