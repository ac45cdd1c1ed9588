"""Marks of gradients: when autograd last added to each."""

import gc
import weakref
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_unified.step.ranks.overlap import GradientMarks


@pytest.fixture
def parameter():
    return nn.Parameter(torch.ones(3))


@pytest.fixture
def marks(parameter):
    numbers = count(1)
    return GradientMarks([parameter, nn.Parameter(torch.ones(2), requires_grad=False)], lambda: next(numbers))


def test_a_gradient_has_the_mark_of_the_last_addition(parameter, marks):
    for number in (1, 2):
        (2 * parameter).sum().backward()
        assert marks.of(parameter.grad) == number


def test_a_gradient_used_twice_is_marked_when_it_is_complete(parameter, marks):
    inside = checkpoint(lambda x: parameter * x, torch.ones(3, requires_grad=True), use_reentrant=True)
    (2 * parameter + inside).sum().backward()

    assert torch.equal(parameter.grad, 3 * torch.ones(3))
    assert marks.of(parameter.grad) == 2  # a reentrant backward pass adds by itself


@pytest.mark.parametrize(
    "write",
    [
        lambda parameter: parameter.grad.mul_(2),
        lambda parameter: torch._foreach_div_([parameter.grad], 2.0),
        lambda parameter: setattr(parameter, "grad", parameter.grad.clone()),
        lambda parameter: parameter.grad.view(-1)[:1].zero_(),
    ],
)
def test_a_gradient_written_since_has_no_mark(parameter, marks, write):
    (2 * parameter).sum().backward()
    write(parameter)

    assert marks.of(parameter.grad) is None


def test_a_gradient_of_an_earlier_step_has_no_mark_after_zeroing(parameter, marks):
    (2 * parameter).sum().backward()
    parameter.grad.zero_()

    assert marks.of(parameter.grad) is None


def test_marks_keep_no_gradient_alive(parameter, marks):
    (2 * parameter).sum().backward()
    gradient = weakref.ref(parameter.grad)
    parameter.grad = None
    gc.collect()

    assert gradient() is None


def test_marks_do_not_outlive_their_owner(parameter):
    calls = []
    marks = GradientMarks([parameter], lambda: calls.append(0))
    (2 * parameter).sum().backward()
    del marks
    gc.collect()
    (2 * parameter).sum().backward()

    assert len(calls) == 1
