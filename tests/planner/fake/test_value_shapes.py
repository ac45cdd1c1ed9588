"""Results whose shapes hang on values look in a fake world as on a device."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_unified.cost_model.backends import mimic
from lightning_unified.planner.fake.known_values import set_value
from lightning_unified.planner.fake.mode import fake_world

LENGTHS, MASK = torch.tensor([3, 5, 2]), torch.tensor([[True, False, True], [False, True, True]])


def looks(tensors):
    return [(tuple(one.shape), one.dtype) for one in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]


def packed(source, lengths, *, first):
    sequence = pack_padded_sequence(source, lengths, batch_first=first, enforce_sorted=False)
    padded, counts = pad_packed_sequence(sequence, batch_first=first, total_length=6)
    (slope,) = torch.autograd.grad(padded.sum(), source)
    return sequence.data, sequence.batch_sizes, padded, counts, slope


def recurrent(source, lengths, kind):
    layer = kind(4, 6, num_layers=2, bidirectional=True)
    sequence, state = layer(pack_padded_sequence(source, lengths, enforce_sorted=False))
    (slope,) = torch.autograd.grad(sequence.data.sum(), source)
    return sequence.data, *(state if isinstance(state, tuple) else (state,)), slope


def spoken(logs, lengths):
    losses = F.ctc_loss(logs.log_softmax(-1), torch.ones(3, 9, dtype=torch.long), torch.full((3,), 20), lengths)
    (slope,) = torch.autograd.grad(losses, logs)
    return losses, slope


def quantized(source):
    scales, zeros = torch.ones(4), torch.zeros(4, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(source, scales, zeros, 0, -128, 127)


def grouped(source, *, dtype):
    source, weight, ends = (
        source.to(dtype),
        torch.ones(2, 16, 24, dtype=dtype, requires_grad=True),
        torch.tensor([3, 4], dtype=torch.int32),
    )
    done = torch._grouped_mm(source, weight, offs=ends)
    return done, *torch.autograd.grad((done * 2).sum(), (source, weight))


CASES = {
    "packed, rows first": (lambda x, n: packed(x, n, first=True), (3, 5, 4)),
    "packed, steps first": (lambda x, n: packed(x, n, first=False), (5, 3, 4)),
    "LSTM of packed rows": (lambda x, n: recurrent(x, n, torch.nn.LSTM), (5, 3, 4)),
    "GRU of packed rows": (lambda x, n: recurrent(x, n, torch.nn.GRU), (5, 3, 4)),
    "RNN of packed rows": (lambda x, n: recurrent(x, n, torch.nn.RNN), (5, 3, 4)),
    "ctc": (spoken, (20, 3, 7)),
    "entries of a mask": (lambda x, _: x[MASK], (2, 3, 4)),
    "entries of a mask beside others": (lambda x, _: x[1, :, MASK], (2, 5, 2, 3)),
    "masked select": (lambda x, _: x.masked_select(MASK), (4, 2, 3)),
    "an operation that torch cannot fake": (lambda x, _: quantized(x), (4, 8)),
    "grouped product in float32": (lambda x, _: grouped(x, dtype=torch.float32), (4, 16)),
    "grouped product in float16": (lambda x, _: grouped(x, dtype=torch.float16), (4, 16)),
}


@pytest.mark.parametrize("case", CASES)
def test_known_values_decide_shapes_though_others_are_unknown(case, monkeypatch):
    run, shape = CASES[case]
    expected = looks(run(torch.randn(shape, requires_grad=True), LENGTHS))

    with fake_world() as (_, answers):
        mask = set_value(torch.empty(MASK.shape, dtype=torch.bool), MASK)
        monkeypatch.setitem(globals(), "MASK", mask)
        lengths = set_value(torch.empty(LENGTHS.shape, dtype=torch.int64), LENGTHS)
        found = looks(run(torch.empty(shape, requires_grad=True), lengths))

    assert found == expected
    assert answers.reads == []


@pytest.mark.parametrize(("backend", "kernel"), [("cpu", False), ("cuda", True), ("mps", False)])
def test_an_lstm_of_packed_rows_is_one_kernel_on_cuda_alone(backend, kernel):
    with fake_world(), mimic(backend):
        lengths = set_value(torch.empty(LENGTHS.shape, dtype=torch.int64), LENGTHS)
        data, *_ = recurrent(torch.empty(5, 3, 4, requires_grad=True), lengths, torch.nn.LSTM)
    assert ("_Recurrence" in str(data.grad_fn)) is kernel


def test_unknown_lengths_count_as_full_and_are_noted():
    with fake_world() as (_, answers):
        source, lengths = torch.empty(3, 5, 4), torch.empty(3, dtype=torch.int64)
        sequence = pack_padded_sequence(source, lengths, batch_first=True, enforce_sorted=False)
        assert sequence.data.shape == (15, 4)
    assert [read.shapes for read in answers.reads] == [True]


def test_what_writes_is_not_run_on_zeros():
    from lightning_unified.planner.fake.own_kernels import run_on_zeros

    with pytest.raises(NotImplementedError):
        run_on_zeros(torch.ops.aten.add_.Tensor, [torch.empty(2), torch.empty(2)], {})


def test_what_draws_on_zeros_leaves_the_generators_as_they_are():
    from lightning_unified.planner.fake.own_kernels import run_on_zeros

    own = torch.Generator().manual_seed(1)
    before = torch.get_rng_state(), own.get_state()
    drawn = run_on_zeros(torch.ops.aten._sample_dirichlet.default, [torch.ones(2, 3)], {"generator": own})
    assert (drawn.shape, drawn.device.type) == ((2, 3), "meta")
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(own.get_state(), before[1])
