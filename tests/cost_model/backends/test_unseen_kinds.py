"""Kernels of unseen kinds: learned attention biases, fused cells, casts of joined tensors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified.cost_model.backends import mimic

B, H, S, E = 2, 2, 32, 16


def attends(operations, bias):
    q, k, v = (torch.empty(B, H, S, E, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with mimic("cuda"), operations() as seen:
        F.scaled_dot_product_attention(q, k, v, attn_mask=bias).sum().backward()
    return next(name for name in seen.names if "attention" in name)


def bias(*shape, learned=False, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, requires_grad=learned)


@pytest.mark.parametrize(
    ("shape", "learned", "kernel"),
    [
        ((1, H, S, S), False, "cudnn"),
        ((S, S), False, "cudnn"),
        ((B, 1, 1, S), False, "cudnn"),
        ((1, H, S, S), True, "efficient"),
        ((H, S, S), False, "efficient"),
    ],
)
def test_cudnn_attention_takes_no_learned_bias_and_none_of_three_dimensions(fake, operations, shape, learned, kernel):
    assert attends(operations, bias(*shape, learned=learned)) == f"_scaled_dot_product_{kernel}_attention"


def test_a_learned_bias_gets_a_gradient_of_its_own_shape(fake):
    learned = bias(1, H, S, S, learned=True)
    q = torch.empty(B, H, S, E, dtype=torch.bfloat16, requires_grad=True)
    with mimic("cuda"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=learned).sum().backward()
    assert learned.grad.shape == learned.shape


@pytest.mark.parametrize(("cell", "entries"), [(nn.LSTMCell, 4), (nn.GRUCell, 5)])
def test_a_fused_cell_saves_its_products_and_gates_under_autocast(fake, kept, cell, entries):
    layer, source, state = cell(8, 16), torch.empty(4, 8), torch.empty(4, 16)
    given = (state, state) if cell is nn.LSTMCell else state
    with mimic("cuda"), torch.autocast("cuda", torch.bfloat16):
        out = layer(source, given)
        saved = kept(lambda: layer(source, given), source, state, *layer.parameters())
    states = out if isinstance(out, tuple) else (out,)
    assert {one.dtype for one in states} == {torch.bfloat16}
    products = 2 * 4 * (4 if cell is nn.LSTMCell else 3) * 16 * 2
    assert saved >= products + 4 * entries * 16 * 2
    sum(one.float().sum() for one in states).backward()
    assert all(one.grad.shape == one.shape for one in layer.parameters())


@pytest.mark.parametrize("join", [torch.cat, torch.hstack, torch.stack])
def test_joining_mixed_precisions_copies_nothing_on_cuda(fake, operations, join):
    low, high = torch.empty(4, 4, dtype=torch.bfloat16), torch.empty(4, 4)

    def casts(backend):
        with mimic(backend), torch.autocast("cpu", torch.bfloat16), operations() as seen:
            assert join([low, high]).dtype is torch.float32
        return seen.names.count("_to_copy")

    assert casts("cuda") == 0
    assert casts("cpu") == 1


def test_fourier_transforms_keep_their_precision_on_cuda(fake):
    with mimic("cuda"), torch.autocast("cpu", torch.bfloat16):
        assert torch.fft.rfft(torch.empty(4, 8, dtype=torch.float64)).dtype is torch.complex128
