"""Attention in chunks equals torch's, with dropout, recomputation and autocast."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lightning_unified.nn.attention import ChunkedAttention, chunks, function, queries_of_chunk
from lightning_unified.nn.checkpoint import recompute
from lightning_unified.nn.recomputing import Recomputing
from lightning_unified.step.exactness.draws.replay import RecordDraws, ReplayDraws
from tests.support.lanes import crossed, first_cells

ROWS, LENGTH, KEYS, WIDTH = 3, 70, 45, 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(function, "queries_of_chunk", partial(queries_of_chunk, target=1))


@pytest.fixture
def chunked():
    attention = ChunkedAttention(torch.nn.Identity())
    yield attention
    attention.remove()


def given(*, heads=4, groups=1, length=LENGTH, keys=KEYS, rows=ROWS, dtype=torch.float64):
    """Return queries, keys and values of one attention."""
    generator = torch.Generator().manual_seed(1)
    shapes = (heads, length, WIDTH), (heads // groups, keys, WIDTH), (heads // groups, keys, WIDTH + 2)
    made = (torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [one.to(dtype).requires_grad_() for one in made]


def masks():
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(1, 4, LENGTH, KEYS, generator=generator, dtype=torch.float64)
    seen = torch.rand(ROWS, 1, LENGTH, KEYS, generator=generator) > 0.3
    hidden = seen.clone()
    hidden[0, 0, 3] = False
    padding = (torch.arange(KEYS) < torch.tensor([[45], [9], [30]]))[:, None, None]
    return {
        "none": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}, "booleans": {"attn_mask": seen},
        "a query without keys": {"attn_mask": hidden}, "padding": {"attn_mask": padding}, "floats": {"attn_mask": bias},
        "a learned bias": {"attn_mask": bias.clone().requires_grad_()}, "two dimensions": {"attn_mask": seen[0, 0]},
        "a learned bias of each head": {"attn_mask": bias[:, :, :1, :1].clone().requires_grad_()},
    }  # fmt: skip


def result(attention, tensors, arguments):
    """Return the output, and the gradients of all that is learned."""
    mask = arguments.get("attn_mask")
    wanted = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    output = attention(*tensors, **arguments)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [output, *torch.autograd.grad((output * weights.to(output.dtype)).sum(), wanted)]


def assert_equal(tensors, arguments, chunked):
    expected = result(function.TORCHS, tensors, arguments)
    found = result(F.scaled_dot_product_attention, tensors, arguments)

    assert chunked.calls == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@first_cells(
    2,
    ("mask", "groups"),
    crossed(masks(), [1, 2, 4], fast=[*((mask, 1) for mask in masks()), ("causal", 2), ("padding", 4)]),
)
def test_values_and_gradients_equal_torchs(mask, groups, chunked):
    assert_equal(given(groups=groups), {**masks()[mask], "enable_gqa": groups > 1}, chunked)


@first_cells(2, "length", [1, 45, 200])
def test_causal_queries_may_be_fewer_or_more_than_keys(length, chunked):
    assert_equal(given(length=length), {"is_causal": True}, chunked)


@first_cells(2, "shape", [(), (5,), (2, 3, 2)], ids=str)
def test_any_number_of_leading_dimensions_is_accepted(shape, chunked):
    tensors = [torch.randn(*shape, 40, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert_equal(tensors, {}, chunked)


def test_rows_of_keys_are_broadcast(chunked):
    query, key, value = given()
    assert_equal([query, key[:1].detach().requires_grad_(), value[:1].detach().requires_grad_()], {}, chunked)


@pytest.mark.slow
def test_gradients_with_dropout_are_those_of_the_noise_drawn_forward():
    call = chunks.Call(causal=True, scale=0.5, dropout=0.3, groups=2, chunk=3)

    def seeded(*tensors):
        torch.manual_seed(7)
        return chunks.attention_in_chunks(call, *tensors, None)

    assert torch.autograd.gradcheck(seeded, given(rows=1, length=7, keys=7, groups=2))


def test_the_backward_pass_leaves_the_generator_where_it_was(chunked):
    output = F.scaled_dot_product_attention(*given(), dropout_p=0.5)
    before = torch.get_rng_state()
    output.sum().backward()

    assert torch.equal(torch.get_rng_state(), before)


def test_all_probabilities_may_be_dropped(chunked):
    output, *gradients = result(F.scaled_dot_product_attention, given(), {"dropout_p": 1.0})

    assert not any(one.any() for one in (output, *gradients))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_recomputed_attention_has_the_same_gradients(dropout, chunked):
    def attended(*tensors):
        return F.dropout(F.scaled_dot_product_attention(*tensors, dropout_p=dropout), 0.3)

    found = []
    for run in (attended, partial(recompute, attended)):
        torch.manual_seed(5)
        found.append(result(run, given(), {}))

    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Block(torch.nn.Module):
    def forward(self, query, key, value):
        return F.dropout(F.scaled_dot_product_attention(query * 2, key, value, dropout_p=0.4), 0.3)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_block_that_saves_attention_outputs_saves_those_of_chunks(keeps, chunked, monkeypatch):
    runs = []
    monkeypatch.setattr(chunks, "_forward", lambda *call, run=chunks._forward: (runs.append(1), run(*call))[1])
    block, found = Block(), []
    for policy in (False, True):
        recomputing = Recomputing([block] if policy else [], keep_attention=keeps)
        torch.manual_seed(5)
        found.append(result(block, given(), {}))
        recomputing.remove()

    assert len(runs) == (2 if keeps else 3)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_micro_batches_get_the_dropout_of_their_rows(chunked):
    tensors = given()
    with RecordDraws() as recorded:
        whole = result(F.scaled_dot_product_attention, tensors, {"dropout_p": 0.4})[1:]
    parts = []
    for start, stop in ((0, 1), (1, 3)):
        rows = [one[start:stop].detach().requires_grad_() for one in tensors]
        with ReplayDraws(recorded.draws, rows=ROWS, start=start, stop=stop, order="interleaved") as replay:
            output = F.scaled_dot_product_attention(*rows, dropout_p=0.4)
            weights = torch.randn(
                ROWS, *output.shape[1:], generator=torch.Generator().manual_seed(3), dtype=torch.float64
            )
            parts.append(torch.autograd.grad((output * weights[start:stop]).sum(), rows))
        replay.finish()
        assert not replay.troubles

    for all_rows, *of_parts in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat(of_parts), all_rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_no_worse_than_torchs_math(dtype, chunked):
    exact = result(function.TORCHS, given(), {})
    math = torch.ops.aten._scaled_dot_product_attention_math
    errors = []
    for attention in (F.scaled_dot_product_attention, lambda *tensors: math(*tensors)[0]):
        found = result(attention, given(dtype=dtype), {})
        assert all(one.dtype is dtype for one in found)
        errors.append([float((one.double() - other).norm()) for one, other in zip(found, exact, strict=True)])

    assert all(ours <= 1.1 * theirs for ours, theirs in zip(*errors, strict=True))


def test_autocast_casts_the_tensors_as_for_torchs_function(chunked):
    with torch.autocast("cpu", torch.bfloat16):
        output = F.scaled_dot_product_attention(*given(dtype=torch.float32))
        expected = function.TORCHS(*given(dtype=torch.float32))
    output.sum().backward()

    assert output.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)


def test_torch_answers_calls_without_gradients_and_those_of_torch_func(chunked):
    tensors = given()
    with torch.no_grad():
        F.scaled_dot_product_attention(*tensors)
    torch.func.grad(lambda query: F.scaled_dot_product_attention(query, *tensors[1:]).sum())(tensors[0].detach())

    assert chunked.calls == 0


@pytest.mark.parametrize(
    "arguments",
    [{"attn_mask": torch.ones(LENGTH, KEYS, dtype=torch.bool), "is_causal": True}, {"attn_mask": torch.ones(7, KEYS)}],
    ids=["mask and causal", "a mask of another length"],
)
def test_arguments_that_torch_refuses_meet_torchs_error(arguments, chunked):
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*given(), **arguments)


def test_a_second_derivative_is_refused_by_name(chunked):
    query, *others = given()
    with pytest.raises(RuntimeError, match=r"no second derivative .*memory\.attention=torch"):
        torch.autograd.grad(F.scaled_dot_product_attention(query, *others).sum(), query, create_graph=True)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "expected"),
    [(12, 4096, 4096, 32), (14, 2048, 2048, 64), (12, 128, 128, 128), (64, 100_000, 100_000, 32), (1, 1, 5, 1)],
)
def test_a_chunk_is_a_function_of_one_rows_scores(heads, queries, keys, expected):
    assert queries_of_chunk(heads=heads, queries=queries, keys=keys, entry_bytes=4) == expected
