"""Gradients of split batches keep their memory from step to step, where nothing else uses it."""

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_unified import UnifiedStrategy
from lightning_unified.step.loop import gradient_places
from lightning_unified.step.loop.gradient_places import GradientPlaces
from lightning_unified.step.recovery.budget_watch import BudgetWatch


def parameters(count=3):
    return [nn.Parameter(torch.full((4,), float(number + 1))) for number in range(count)]


def backward(used, *, factor=2.0):
    torch.stack([one * factor for one in used]).sum().backward()


def backward_anew(used):
    """Compute gradients in other memory than before."""
    held = [one.grad for one in used]
    for one in used:
        one.grad = None
    backward(used)
    held.clear()


def step(places, optimizer, trained, used):
    """Zero and compute gradients as a batch does; return the addresses before and after."""
    before = [None if one.grad is None else one.grad.data_ptr() for one in trained]
    places.zero(optimizer.zero_grad, trained)
    assert all(one.grad is None for one in trained)
    places.give()
    backward(used, factor=3.0)
    places.settle()
    return before, [None if one.grad is None else one.grad.data_ptr() for one in trained]


@pytest.fixture
def trained():
    found = parameters()
    backward(found)
    return found


def test_gradients_return_to_their_memory(trained):
    before, after = step(GradientPlaces(), torch.optim.SGD(trained), trained, trained)

    assert before == after
    assert all(torch.equal(one.grad, torch.full((4,), 3.0)) for one in trained)


def test_a_parameter_without_a_gradient_has_none(trained):
    _, after = step(GradientPlaces(), torch.optim.SGD(trained), trained, trained[:2])

    assert [address is None for address in after] == [False, False, True]


def test_a_gradient_of_zero_stays(trained):
    places = GradientPlaces()
    places.zero(torch.optim.SGD(trained).zero_grad, trained)
    places.give()
    backward(trained, factor=0.0)
    places.settle()

    assert all(torch.equal(one.grad, torch.zeros(4)) for one in trained)


@pytest.mark.parametrize("held", [lambda one: one, lambda one: one[1:], lambda one: one.detach()])
def test_a_gradient_that_others_hold_keeps_its_values(trained, held):
    other = held(trained[0].grad)
    values = other.clone()
    before, after = step(GradientPlaces(), torch.optim.SGD(trained), trained, trained)

    assert torch.equal(other, values)
    assert before[0] != after[0]
    assert before[1:] == after[1:]


def test_sparse_gradients_stay_sparse():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    places = GradientPlaces()
    places.zero(torch.optim.SGD(table.parameters()).zero_grad, [table.weight])
    places.give()
    table(torch.tensor([2])).sum().backward()
    places.settle()

    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert table.weight.grad.coalesce().indices().tolist() == [[2]]


def test_gradients_that_zero_grad_leaves_are_left(trained):
    optimizer, places = torch.optim.SGD(trained), GradientPlaces()
    own = [one.grad for one in trained]
    places.zero(lambda: optimizer.zero_grad(set_to_none=False), trained)
    places.give()
    backward(trained)
    places.settle()

    assert all(one.grad is before for one, before in zip(trained, own, strict=True))
    assert all(torch.equal(one.grad, torch.full((4,), 2.0)) for one in trained)


def test_forgotten_memory_is_not_given(trained):
    places = GradientPlaces()
    places.zero(torch.optim.SGD(trained).zero_grad, trained)
    places.forget()
    places.give()

    assert all(one.grad is None for one in trained)


def with_state():
    found = parameters()
    optimizer = torch.optim.AdamW(found, 0.1)
    backward(found)
    optimizer.step()
    return found, optimizer


def tensors_of(found, optimizer):
    states = [value for one in found for value in optimizer.state[one].values() if value.numel() > 1]
    return [*(one.grad for one in found), *states]


@pytest.fixture
def small_counts(monkeypatch):
    monkeypatch.setattr(gradient_places, "_SMALL", 8)


@pytest.mark.usefixtures("small_counts")
def test_packing_moves_tensors_down_and_keeps_their_values():
    found, optimizer = with_state()
    held = tensors_of(found, optimizer)
    values, before = [one.clone() for one in held], [one.data_ptr() for one in held]
    GradientPlaces().pack(optimizer)

    assert [id(one) for one in tensors_of(found, optimizer)] == [id(one) for one in held]
    assert all(torch.equal(one, value) for one, value in zip(held, values, strict=True))
    assert all(one.data_ptr() <= address for one, address in zip(held, before, strict=True))


@pytest.mark.usefixtures("small_counts")
def test_gradients_that_are_packed_stay(monkeypatch):
    found, optimizer = with_state()
    places, moves = GradientPlaces(), []
    monkeypatch.setattr(gradient_places, "_move_down", moves.append)
    places.pack(optimizer)
    places.pack(optimizer)
    assert len(moves) == 1

    backward_anew(found[:1])
    places.pack(optimizer)
    assert len(moves) == 1, "most are where they were"

    backward_anew(found)
    places.pack(optimizer)
    assert len(moves) == 2


@pytest.mark.usefixtures("small_counts")
def test_memory_that_others_use_is_not_moved(monkeypatch):
    found, optimizer = with_state()
    held = tensors_of(found, optimizer)
    views = [one[:1] for one in held]
    before = [one.data_ptr() for one in held]
    monkeypatch.setattr(Tensor, "clone", lambda _: pytest.fail("nothing may move"))
    GradientPlaces().pack(optimizer)

    assert [one.data_ptr() for one in held] == before == [one.data_ptr() for one in views]


@pytest.mark.usefixtures("small_counts")
def test_memory_that_runs_out_leaves_the_rest(monkeypatch):
    found, optimizer = with_state()
    held = tensors_of(found, optimizer)
    values, before = [one.clone() for one in held], [one.data_ptr() for one in held]

    def fail(_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", fail)
        GradientPlaces().pack(optimizer)

    assert [one.data_ptr() for one in held] == before
    assert all(torch.equal(one, value) for one, value in zip(held, values, strict=True))


class Switching(L.LightningModule):
    """A module whose second layer gets a gradient in every other batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.addresses, self.gradients = [], []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        hidden = torch.tanh(self.first(inputs))
        if batch_idx % 2:
            hidden = hidden + torch.tanh(self.second(hidden)) + self.first(hidden)
        return nn.functional.cross_entropy(self.head(hidden), targets)

    def on_before_optimizer_step(self, optimizer):
        self.addresses.append([None if one.grad is None else one.grad.data_ptr() for one in self.parameters()])
        self.gradients.append([None if one.grad is None else one.grad.clone() for one in self.parameters()])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)


def trained_module(strategy, **options):
    torch.manual_seed(0)
    module = Switching().double()
    data = torch.utils.data.TensorDataset(torch.randn(48, 6).double(), torch.randint(0, 2, (48,)))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, strategy=strategy, enable_model_summary=False, **quiet, **options
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    return module


@pytest.mark.parametrize("window", [1, 2])
def test_a_fit_in_expanding_segments_equals_plain_training(monkeypatch, window):
    monkeypatch.setattr(BudgetWatch, "expands", property(lambda _: True, lambda *_: None), raising=False)
    plain = trained_module("auto", accumulate_grad_batches=window)
    split = trained_module(UnifiedStrategy(micro_batch_size=3), accumulate_grad_batches=window)

    for one, other in zip(plain.gradients, split.gradients, strict=True):
        for left, right in zip(one, other, strict=True):
            assert (left is None) == (right is None)
            assert left is None or torch.allclose(left, right, rtol=1e-10, atol=1e-12)
    for left, right in zip(plain.parameters(), split.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=1e-10, atol=1e-12)
    if window == 1:
        assert len({tuple(one[:2]) for one in split.addresses}) == 1
