"""Buffers are put back as a step found them, whatever was learnt of them before."""

import pytest
import torch
from torch import nn

from lightning_unified.errors import RunError
from lightning_unified.training.buffers import BufferWatch


class Buffers(nn.Module):
    """`moves` changes in every step, `rests` in none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moves", torch.zeros(2))
        self.register_buffer("rests", torch.ones(3))


@pytest.fixture
def learnt():
    """A module and its watch after a first step, and a second that found nothing new."""
    module = Buffers()
    watch = BufferWatch(module)
    for _ in range(2):
        watch.note()
        module.moves.add_(1)
        watch.learn()
    return module, watch


def test_what_moves_is_put_back_and_what_rests_is_not_copied(learnt):
    module, watch = learnt
    watch.note()
    module.moves.add_(5)
    watch.restore()

    assert module.moves.tolist() == [2, 2]
    assert [copy.shape for copy in watch._copies.values()] == [(2,)]


def test_a_resting_buffer_that_changes_in_a_failed_step_cannot_be_put_back_and_is_copied_once_it_has_changed(learnt):
    module, watch = learnt
    watch.note()
    module.rests.add_(1)
    with pytest.raises(RunError, match="changed the buffer 'rests' of Buffers for the first time"):
        watch.restore()
    watch.note()
    module.rests.add_(1)
    watch.learn()
    watch.note()
    module.rests.add_(1)
    watch.restore()

    assert module.rests.tolist() == [3, 3, 3]


def test_a_buffer_assigned_anew_in_a_failed_step_is_the_old_one_again(learnt):
    module, watch = learnt
    watch.note()
    moves, rests = module.moves, module.rests
    module.moves, module.rests = torch.full((2,), 7.0), torch.full((3,), 7.0)
    watch.restore()

    assert module.moves is moves
    assert module.rests is rests


def test_a_buffer_assigned_anew_in_every_step_is_put_back(learnt):
    module, watch = learnt
    for _ in range(3):
        watch.note()
        module.rests = module.rests + 1
        watch.learn()
    watch.note()
    module.rests.mul_(0)
    module.rests = module.rests - 1
    watch.restore()

    assert module.rests.tolist() == [4, 4, 4]


@pytest.mark.parametrize("name", ["moves", "rests"])
def test_what_a_buffer_became_between_two_steps_is_what_is_put_back(learnt, name):
    module, watch = learnt
    setattr(module, name, torch.full((2, 2), 3.0))
    getattr(module, name).add_(1)
    watch.note()
    module.moves.add_(1)
    watch.restore()

    assert getattr(module, name).tolist() == [[4, 4], [4, 4]]
    watch.learn()
    assert len(watch._copies) == 1  # a change between steps is no reason to copy


@pytest.mark.parametrize("data", [torch.ones(1), torch.ones(4), torch.tensor([2**53 + 1] * 2)], ids=str)
def test_a_moving_buffer_whose_data_was_exchanged_is_copied_in_its_new_shape_and_dtype(learnt, data):
    module, watch = learnt
    module.moves.data = data.clone()
    watch.note()
    module.moves.add_(1)
    watch.restore()

    assert torch.equal(module.moves, data)
    assert module.moves.dtype == data.dtype


def test_batch_norm_statistics_that_rest_at_first_are_put_back():
    module = nn.BatchNorm1d(2).eval()
    watch = BufferWatch(module)
    watch.note()
    module(torch.randn(4, 2))
    watch.learn()
    module.train()
    watch.note()
    module(torch.randn(4, 2))
    watch.restore()

    assert (module.running_mean.tolist(), module.num_batches_tracked.item()) == ([0, 0], 0)


def test_a_buffer_that_was_not_there_yet_is_not_there_again():
    module = nn.Module()
    module.register_buffer("late", None)
    watch = BufferWatch(module)
    watch.note()
    module.late = torch.ones(2)
    watch.restore()

    assert module.late is None
