import pytest
import torch
from torch.nn import functional as F

from lightning_unified.cost_model.backends import attention, mimic

B, H, S, E = 2, 4, 24, 16
PHILOX = 24  # flash's, whose second number is two
CUDNN = "_scaled_dot_product_cudnn_attention"


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(attention, "generation", lambda: 8)


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
def test_half_precision_keeps_output_and_log_sum_exp_only(fake, kept, ampere, backend, dropout):
    inputs = qkv(torch.bfloat16)
    with mimic(backend):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs, dropout_p=dropout, is_causal=True), *inputs)
    assert count == B * H * S * (2 * E + 4) + PHILOX


def test_heads_are_padded_to_eight_for_flash(fake, kept, ampere):
    inputs = qkv(torch.bfloat16, size=12)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs), *inputs)
    assert count == 4 * B * H * S * 2 * 16 + B * H * S * 4 + PHILOX


def test_float32_runs_the_efficient_kernel_whose_log_sum_exp_is_rounded_to_32(fake, kept):
    inputs = qkv(torch.float32)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs), *inputs)
    assert count == B * H * (S * E + 32) * 4 + 16


def test_a_mask_runs_the_efficient_kernel(fake, operations, ampere):
    ran = names(operations, "cuda", qkv(torch.bfloat16), attn_mask=torch.ones(S, S, dtype=torch.bool))
    assert "_scaled_dot_product_efficient_attention_backward" in ran
    assert "_scaled_dot_product_flash_attention" not in ran


def test_a_mask_is_kept_in_the_queries_dtype_padded_to_16_keys(fake, kept, ampere):
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


def test_causal_attention_of_fewer_queries_than_keys_is_not_flash(fake, operations, ampere):
    ran = names(operations, "cuda", qkv(torch.bfloat16, keys=2 * S), is_causal=True)
    assert "_scaled_dot_product_efficient_attention" in ran


def test_grouped_heads_are_not_repeated_for_flash(fake, kept, ampere):
    inputs = qkv(torch.bfloat16, heads=2)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs, enable_gqa=True), *inputs)
    assert count == B * H * S * (2 * E + 4) + PHILOX


@pytest.mark.parametrize("mask", [None, torch.bool, torch.bfloat16])
def test_half_precision_is_cudnns_on_hopper_with_a_mask_too(fake, kept, operations, mask):
    inputs, mask = qkv(torch.bfloat16), None if mask is None else torch.ones(S, S, dtype=mask)
    assert f"{CUDNN}_backward" in names(operations, "cuda", inputs, attn_mask=mask)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs, attn_mask=mask), *inputs)
    assert count == B * H * S * (2 * E + 4) + 16 + (0 if mask is None else S * S * 2)


def test_what_cudnn_writes_lies_in_memory_as_the_queries_do(fake):
    positions_first = torch.empty(S, B, H, E, dtype=torch.bfloat16, requires_grad=True)
    query = positions_first.permute(1, 2, 0, 3)
    with mimic("cuda"):
        out = F.scaled_dot_product_attention(query, query, query)
    assert out.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize(("size", "keys"), [(12, S), (264, S), (E, 1)])
def test_shapes_that_cudnn_does_not_take_run_another_kernel(fake, operations, size, keys):
    assert CUDNN not in names(operations, "cuda", qkv(torch.bfloat16, size=size, keys=keys))


def test_cudnn_is_not_rocms_and_not_for_those_who_want_the_same_bits(fake, operations):
    assert CUDNN not in names(operations, "rocm", qkv(torch.bfloat16))
    torch.use_deterministic_algorithms(True)
    try:
        assert CUDNN not in names(operations, "cuda", qkv(torch.bfloat16))
    finally:
        torch.use_deterministic_algorithms(False)


def test_grouped_heads_in_float32_materialise_the_probabilities(fake, kept):
    inputs = qkv(torch.float32, heads=2)
    with mimic("cuda"):
        count = kept(lambda: F.scaled_dot_product_attention(*inputs, enable_gqa=True), *inputs)
    assert count == 4 * B * H * (S * S + 3 * S * E)


def test_the_mask_of_materialised_probabilities_is_added_in_place(fake, operations):
    ran = names(operations, "cuda", qkv(torch.float32, heads=2), enable_gqa=True, is_causal=True)
    assert "add_" in ran
    assert "add" not in ran[: ran.index("_safe_softmax")]


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


def test_autocast_lowers_the_inputs_to_flash(fake, operations, ampere):
    with torch.autocast("cpu", torch.bfloat16):
        ran = names(operations, "cuda", qkv(torch.float32))
    assert "_scaled_dot_product_flash_attention" in ran


def test_a_cpu_is_left_as_it_is(fake, operations):
    ran = names(operations, "cpu", qkv(torch.float32))
    assert ran == names(operations, "cpu", qkv(torch.float32))
    assert not any("flash_attention_backward" in name and "cpu" not in name for name in ran)
