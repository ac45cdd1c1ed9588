"""The kernels of a decode step compute what torch computes."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.models.grpo.rollout import SamplingOptions
from lightning_unified.models.grpo.rollout.few_rows.operators import add_adapters, attend_token, products
from lightning_unified.models.grpo.rollout.sampling import draw

pytestmark = pytest.mark.gpu

KINDS = (torch.bfloat16, torch.float16)


def drawn(*shape: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64])
@pytest.mark.parametrize("width", [64, 200, 2048])
def test_products_of_several_weights_are_those_of_linear_layers(rows: int, width: int, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x = drawn(rows, 1, width, kind=kind)
    weights = [drawn(size, width, kind=kind) / width**0.5 for size in (300, 64, 1030, 8192)]
    weights += [drawn(rank, width, kind=torch.float32) / width**0.5 for rank in (8, 16)]
    biases = [drawn(300, kind=kind), None, drawn(1030, kind=kind), None, None, None]
    for found, weight, bias in zip(products(x, weights, biases), weights, biases, strict=True):
        wide = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert found.dtype == weight.dtype
        torch.testing.assert_close(found, wide.to(found.dtype), rtol=1e-2, atol=1e-2)
        if found.dtype == torch.float32:
            torch.testing.assert_close(found, wide.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_adapters_are_added_as_peft_adds_them(rows: int, narrow: torch.dtype) -> None:
    torch.manual_seed(0)
    bases = [drawn(rows, 1, size) for size in (300, 64)]
    inner = [drawn(rows, 1, rank, kind=narrow) for rank in (8, 20)]
    ups = [drawn(size, rank, kind=narrow) / rank**0.5 for size, rank in ((300, 8), (64, 20))]
    scales = [2.0, 0.3]
    for found, base, one, up, scale in zip(
        add_adapters(bases, inner, ups, scales), bases, inner, ups, scales, strict=True
    ):
        expected = (base + functional.linear(one, up) * scale).to(base.dtype)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "keys"), [(16, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize(("slots", "width"), [(128, 128), (384, 80), (1000, 64)])
def test_attention_of_one_token_is_torchs(heads: int, keys: int, slots: int, width: int, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    query = drawn(3, heads, 1, width, kind=kind)
    key, value = drawn(3, keys, slots, width, kind=kind), drawn(3, keys, slots, width, kind=kind)
    mask = torch.zeros(3, 1, 1, slots, device="cuda", dtype=kind)
    mask[..., slots // 2 :] = torch.finfo(kind).min
    mask[1, ..., : slots // 3] = torch.finfo(kind).min
    found = attend_token(query, key, value, mask, width**-0.5)
    groups = heads // keys
    expected = functional.scaled_dot_product_attention(
        query.float(),
        key.float().repeat_interleave(groups, 1),
        value.float().repeat_interleave(groups, 1),
        attn_mask=mask.float(),
    )
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("rows", "size"), [(1, 61), (2, 151_936), (32, 5000)])
def test_a_drawn_token_is_that_of_torchs_operators(rows: int, size: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(rows, size, device="cuda")
    logits[:, : size // 2] = -torch.inf
    given = SamplingOptions(temperature=temperature)
    tokens, log_probs = draw(logits, given, generator=torch.Generator("cuda").manual_seed(1))
    scores = logits / (temperature or 1)
    noise = torch.empty_like(scores).exponential_(generator=torch.Generator("cuda").manual_seed(1)).log_()
    assert torch.equal(tokens, (scores - noise if temperature else scores).argmax(-1))
    expected = scores.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
