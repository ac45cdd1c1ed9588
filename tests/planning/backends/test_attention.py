import pytest
import torch
from torch.nn import functional as F

from lightning_unified.planning.backends import mimic

B, H, S, E = 2, 4, 24, 16
PHILOX = 24


def qkv(dtype, *, size=E, keys=S, heads=H, grad=True):
    query = torch.empty(B, H, S, size, dtype=dtype, requires_grad=grad)
    key, value = (torch.empty(B, heads, keys, size, dtype=dtype, requires_grad=grad) for _ in range(2))
    return query, key, value


def names(operations, backend, inputs, **options):
    with operations() as ran, mimic(backend):
        out = F.scaled_dot_product_attention(*inputs, **options)
        if out.requires_grad:
            out.sum().backward()
    return ran.names


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_half_precision_keeps_output_and_log_sum_exp_only(fake, kept, backend, dropout):
    inputs = qkv(torch.bfloat16)
    with mimic(backend):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs, dropout_p=dropout, is_causal=True), *inputs)
    assert count == B * H * S * (2 * E + 4) + PHILOX


def test_heads_are_padded_to_eight_for_flash(fake, kept):
    inputs = qkv(torch.bfloat16, size=12)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs), *inputs)
    assert count == 4 * B * H * S * 2 * 16 + B * H * S * 4 + PHILOX


def test_float32_runs_the_efficient_kernel_whose_log_sum_exp_is_rounded_to_32(fake, kept):
    inputs = qkv(torch.float32)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs), *inputs)
    assert count == B * H * (S * E + 32) * 4 + 16


def test_a_mask_runs_the_efficient_kernel(fake, operations):
    ran = names(operations, "cuda", qkv(torch.bfloat16), attn_mask=torch.ones(S, S, dtype=torch.bool))
    assert "_scaled_dot_product_efficient_attention_backward" in ran
    assert "_scaled_dot_product_flash_attention" not in ran


def test_a_mask_is_kept_in_the_queries_dtype_padded_to_16_keys(fake, kept):
    inputs, mask = qkv(torch.bfloat16), torch.ones(S, S, dtype=torch.bool)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs, attn_mask=mask), *inputs)
    assert count == B * H * (S * E * 2 + 32 * 4) + S * 32 * 2 + 16


@pytest.mark.parametrize("size", [6, 18])
def test_unaligned_heads_in_float32_materialise_the_probabilities(fake, operations, size):
    ran = names(operations, "cuda", qkv(torch.float32, size=size))
    assert "_safe_softmax" in ran


def test_dropout_of_materialised_probabilities_keeps_a_mask_of_booleans(fake, kept):
    inputs = qkv(torch.float32, size=6)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs, dropout_p=0.1), *inputs)
    scaled, probabilities = 3 * B * H * S * 6 * 4 - B * H * S * 6 * 4, B * H * S * S
    assert count == scaled + probabilities * (4 + 4 + 1)


def test_causal_attention_of_fewer_queries_than_keys_is_not_flash(fake, operations):
    ran = names(operations, "cuda", qkv(torch.bfloat16, keys=2 * S), is_causal=True)
    assert "_scaled_dot_product_efficient_attention" in ran


def test_grouped_heads_are_not_repeated_for_flash(fake, kept):
    inputs = qkv(torch.bfloat16, heads=2)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs, enable_gqa=True), *inputs)
    assert count == B * H * S * (2 * E + 4) + PHILOX


def test_three_dimensions_run_the_math_path(fake, operations):
    inputs = [torch.empty(B, S, E, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    assert "_safe_softmax" in names(operations, "cuda", inputs)


def test_a_kernel_that_the_user_switched_off_is_not_chosen(fake, operations):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert "_safe_softmax" in names(operations, "cuda", qkv(torch.bfloat16))


def test_training_on_mps_materialises_the_probabilities(fake, kept):
    inputs = qkv(torch.float32)
    with mimic("mps"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs), *inputs)
    assert count == B * H * (S * S + 2 * S * E) * 4


def test_mps_without_gradients_runs_its_own_kernel(fake, operations):
    ran = names(operations, "mps", qkv(torch.float32, grad=False))
    assert "_scaled_dot_product_attention_math_for_mps" in ran


def test_autocast_lowers_the_inputs_to_flash(fake, operations):
    with torch.autocast("cpu", torch.bfloat16):
        ran = names(operations, "cuda", qkv(torch.float32))
    assert "_scaled_dot_product_flash_attention" in ran


def test_a_cpu_is_left_as_it_is(fake, operations):
    ran = names(operations, "cpu", qkv(torch.float32))
    assert ran == names(operations, "cpu", qkv(torch.float32))
    assert not any("flash_attention_backward" in name and "cpu" not in name for name in ran)
