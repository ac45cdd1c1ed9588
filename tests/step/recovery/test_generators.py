"""What is noted of random generators is their state, however little of it is asked anew."""

import random

import numpy as np
import pytest
import torch

from lightning_unified.nn.second_run.generators import _memory_of_numpy, _memory_of_python
from lightning_unified.step.recovery.generators import GeneratorWatch


@pytest.fixture
def generators():
    """Leaves the process's generators, and numpy's kind of bit generator, as it found them."""
    python, numpy, kind = random.getstate(), np.random.get_state(), np.random.get_bit_generator()
    yield GeneratorWatch(torch.device("cpu"))
    np.random.set_bit_generator(kind)
    np.random.set_state(numpy)
    random.setstate(python)


def same(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return np.array_equal(one, other)


def is_exact(watch) -> bool:
    noted = watch.note()
    return same(noted["python"], random.getstate()) and same(noted["numpy"], np.random.get_state())


def set_numpy(state, *, waiting):
    np.random.set_state((*state[:3], int(waiting), 0.5 if waiting else 0.0))


CHANGES = {
    "uniform": lambda: (random.random(), np.random.rand()),
    "normal": lambda: (random.gauss(), np.random.standard_normal()),
    "normal that waited": lambda: (random.gauss(), np.random.standard_normal()),
    "seed": lambda: (random.seed(3), np.random.seed(3)),
    "nothing": lambda: None,
    "deviate put back": lambda: set_numpy(np.random.get_state(), waiting=True),
    "deviate taken out": lambda: set_numpy(np.random.get_state(), waiting=False),
    "whole block": lambda: (random.randbytes(2500), np.random.bytes(2500)),
    "other bit generator": lambda: np.random.set_bit_generator(np.random.PCG64(1)),
    "draw from it": lambda: np.random.standard_normal(),
}


def test_every_kind_of_change_between_two_notes_is_noted(generators):
    np.random.seed(0)
    random.seed(0)
    assert is_exact(generators)
    for name, change in CHANGES.items():
        change()
        assert is_exact(generators), name


def test_a_deviate_that_is_taken_shows_in_memory_though_the_twister_does_not_move(generators):
    np.random.seed(0)
    random.seed(0)
    np.random.standard_normal(), random.gauss()
    (numpy, struct), python = (
        _memory_of_numpy(np.random.get_state.__self__),
        _memory_of_python(random.getstate.__self__),
    )
    before = numpy(), struct(), [read() for read in python]
    np.random.standard_normal(), random.gauss()

    assert struct() == before[1]
    assert numpy() != before[0]
    assert [read() for read in python] != before[2]


def test_generators_that_did_not_move_are_not_asked_again(generators):
    generators.note()
    noted = generators.note(), generators.note()

    assert all(noted[0][name] is noted[1][name] for name in ("python", "numpy"))


def test_what_was_noted_is_put_back_after_draws_and_seeds(generators):
    np.random.standard_normal(), random.gauss()
    noted = generators.note()
    first = (torch.rand(2).tolist(), random.gauss(), random.random(), *np.random.standard_normal(3))
    for disturb in (lambda: None, lambda: (random.seed(1), np.random.seed(1), torch.manual_seed(1))):
        disturb()
        generators.restore(noted)
        again = (torch.rand(2).tolist(), random.gauss(), random.random(), *np.random.standard_normal(3))
        assert again == first
