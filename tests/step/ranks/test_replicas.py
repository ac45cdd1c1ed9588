"""Copies of a module on several ranks, without other processes.

Tests cover which values are averaged, copied and resynchronised, and when.
"""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_unified.errors import ConfigurationError, OutOfMemoryError, RankError
from lightning_unified.step.ranks import reduction
from lightning_unified.step.ranks.consensus import Outcome, Word
from lightning_unified.step.ranks.reduction import Replicas, flat_memory
from lightning_unified.step.ranks.resync import resync

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Alone:
    """Ranks of which there is but this one, and what it would have sent."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.sent = []

    def expect(self, *, parameters):
        self.parameters = parameters

    def average(self, piece):
        self.sent.append(piece)

    def broadcast(self, piece, *, source):
        self.sent.append(piece)


class Pair(Alone):
    """Ranks of which another one has the same gradients."""

    size = 2

    def average(self, piece):
        super().average(piece)
        piece.mul_(2)


class Mixed(nn.Module):
    """Parameters small and large, of several types and layouts, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape, dtype=torch.float32):
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))

        self.small, self.brief = parameter(3, 5), parameter(7, dtype=torch.bfloat16)
        self.large = parameter(600, 500)
        self.odd = nn.Parameter(parameter(8, 64, 32, 32).detach().to(memory_format=torch.channels_last))
        self.imaginary = nn.Parameter(torch.randn(4, dtype=torch.complex64, generator=generator))
        self.scalar, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))


def with_gradients(module):
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    return [parameter.grad.clone() for parameter in module.parameters()]


def test_gradients_of_every_kind_are_averaged_in_their_place():
    module = Mixed()
    replicas, expected = Replicas(module, Pair()), with_gradients(module)
    places = [parameter.grad.data_ptr() for parameter in module.parameters()]
    replicas.average_gradients(replicas.absent())

    for parameter, gradient, place in zip(module.parameters(), expected, places, strict=True):
        assert torch.equal(parameter.grad, gradient)
        assert parameter.grad.data_ptr() == place


def test_large_gradients_are_sent_from_where_they_lie_and_small_ones_together():
    module, ranks = Mixed(), Pair()
    replicas = Replicas(module, ranks)
    with_gradients(module)
    replicas.average_gradients(replicas.absent())
    places = {piece.data_ptr() for piece in ranks.sent}

    assert {module.large.grad.data_ptr(), module.odd.grad.data_ptr()} <= places
    assert len(ranks.sent) == 2 + 3  # float32, bfloat16 and complex64 together


def test_small_gradients_that_are_more_than_the_scratch_memory_holds_go_in_turns(monkeypatch):
    monkeypatch.setattr(reduction, "_SCRATCH", reduction.LARGE)
    module, ranks = nn.ParameterList([nn.Parameter(torch.randn(200_000)) for _ in range(3)]), Pair()
    replicas, expected = Replicas(module, ranks), with_gradients(module)
    replicas.average_gradients(replicas.absent())

    assert len(ranks.sent) == 3
    assert all(torch.equal(p.grad, g) for p, g in zip(module, expected, strict=True))


def test_a_gradient_that_lies_in_another_order_than_its_parameter_is_put_in_order():
    module = Mixed()
    replicas, expected = Replicas(module, Pair()), with_gradients(module)
    module.odd.grad = module.odd.grad.contiguous()
    replicas.average_gradients(replicas.absent())

    assert module.odd.grad.stride() == module.odd.stride()
    assert torch.equal(module.odd.grad, expected[3])


def test_missing_gradients_are_told_and_filled_where_another_rank_has_one():
    module = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
    replicas = Replicas(module, Alone())
    module[0].grad = torch.ones(2)

    assert replicas.absent() == 0b110

    replicas.fill(0b100)

    assert torch.equal(module[1].grad, torch.zeros(2))
    assert module[2].grad is None


def test_a_rank_out_of_memory_in_a_reduction_still_sends_all_its_pieces(monkeypatch):
    module, ranks = Mixed(), Pair()
    replicas = Replicas(module, ranks)
    with_gradients(module)

    def fails(*_):
        raise RuntimeError(TEXT)

    monkeypatch.setattr(reduction, "_copy", fails)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        replicas.average_gradients(replicas.absent())

    assert len(ranks.sent) == 5


def test_sparse_gradients_are_refused_by_name():
    module = nn.Embedding(4, 2, sparse=True)
    module(torch.tensor([1])).sum().backward()

    with pytest.raises(
        ConfigurationError, match=r"that of weight is torch\.sparse_coo; make the layer with sparse=False"
    ):
        Replicas(module, Alone()).absent()


def test_memory_with_gaps_is_refused():
    with pytest.raises(ConfigurationError, match=r"strides \(8, 2\); make it contiguous"):
        flat_memory(torch.zeros(4, 8)[:, ::2])


def test_one_entry_of_a_column_is_read_as_bytes():
    columns = torch.arange(8.0).view(1, 8)
    entry = columns[:, 3]
    flat_memory(entry).view(torch.uint8).zero_()

    assert entry.tolist() == [0.0] and columns[0, 4] == 4.0


def test_modules_that_differ_are_described_differently():
    module = Mixed()
    other = Mixed()
    other.register_buffer("more", torch.zeros(1))

    assert Replicas(module, Alone()).description == Replicas(Mixed(), Alone()).description
    assert Replicas(other, Alone()).description != Replicas(module, Alone()).description


def test_what_ddp_was_told_to_leave_alone_is_left_alone():
    module, ranks = Mixed(), Alone()
    module._ddp_params_and_buffers_to_ignore = ["large", "mask"]
    description = Replicas(module, ranks).description

    assert "large" not in description
    assert "mask" not in description


class Line:
    """Two ranks whose calls run one after the other: what the first sends, the second gets."""

    size = 2
    box: ClassVar[list] = []

    def __init__(self, rank):
        self.rank, self.is_over = rank, False

    def meet(self, point, outcome=Outcome.WELL, *, text=""):
        own = Word(rank=self.rank, point=point, outcome=outcome, digest=0, terms=0.0, absent=0, text=text)
        well = Word(rank=1 - self.rank, point=point, outcome=Outcome.WELL, digest=0, terms=0.0, absent=0)
        return [own, well] if self.rank == 0 else [well, own]

    def broadcast_object(self, value, *, source):
        if self.rank == source:
            self.box.append(value)
            return value
        return self.box.pop(0)

    def broadcast(self, piece, *, source):
        if self.rank == source:
            self.box.append(piece.clone())
        else:
            piece.copy_(self.box.pop(0))

    def end(self):
        self.is_over = True


def stepped(kind, *, steps, **options):
    torch.manual_seed(0)
    module = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
    optimizer = kind(module.parameters(), **options)
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("steps", [0, 1], ids=["that has no state yet", "that is one step behind"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "capturable": False, "foreach": False}),
    ],
)
def test_an_optimizer_takes_over_weights_and_state(kind, options, steps):
    Line.box.clear()
    source, theirs = stepped(kind, steps=2, **options)
    target, mine = stepped(kind, steps=steps, **options)
    with torch.no_grad():
        target.weight.add_(7)
    theirs.param_groups[0]["lr"] = 0.05
    resync(theirs, Precision(), Line(0), source=0, lacks=False)
    resync(mine, Precision(), Line(1), source=0, lacks=True)

    assert torch.equal(target.weight, source.weight)
    assert mine.param_groups[0]["lr"] == 0.05
    assert not Line.box
    for parameter, other in zip(target.parameters(), source.parameters(), strict=True):
        state, expected = mine.state[parameter], theirs.state[other]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state if isinstance(state[name], torch.Tensor))
        assert all(
            state[name].stride() == expected[name].stride()
            for name in state
            if name != "step" and state[name] is not None
        )


def test_a_rank_without_memory_for_the_state_says_so(monkeypatch):
    Line.box.clear()
    _, theirs = stepped(torch.optim.AdamW, steps=1)
    _, mine = stepped(torch.optim.AdamW, steps=0)
    resync(theirs, Precision(), Line(0), source=0, lacks=False)

    def fails(*_args, **_options):
        raise RuntimeError(TEXT)

    monkeypatch.setattr(torch, "empty_strided", fails)
    line = Line(1)
    with pytest.raises(OutOfMemoryError, match="does not fit on rank 1, though it does on rank 0"):
        resync(mine, Precision(), line, source=0, lacks=True)

    assert line.is_over


def test_the_others_of_a_rank_without_memory_for_the_state_name_it(monkeypatch):
    _, mine = stepped(torch.optim.AdamW, steps=1)
    line, meet = Line(0), Line.meet

    def meet_short(self, point, outcome=Outcome.WELL, *, text=""):
        words = meet(self, point, outcome, text=text)
        self.met = getattr(self, "met", 0) + 1
        return [words[0], replace(words[1], outcome=Outcome.SHORT, text=TEXT)] if self.met == 2 else words

    monkeypatch.setattr(Line, "meet", meet_short)
    with pytest.raises(RankError, match="rank 1 has no memory for its optimizer state: CUDA out of memory"):
        resync(mine, Precision(), line, source=0, lacks=False)
