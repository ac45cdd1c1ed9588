"""Draws by Python and NumPy can be made the same for every row, and are theirs again afterwards."""

import random

import numpy as np
import pytest

from lightning_unified.training.exactness.host_draws import equal_host_draws

DRAWS = {
    "rand": lambda rows: np.random.rand(rows, 3),
    "normal": lambda rows: np.random.normal(2.0, 0.1, size=(rows, 2)),
    "randint": lambda rows: np.random.randint(0, 9, rows),
    "loop": lambda rows: np.stack([np.random.choice(9, 4, replace=False) for _ in range(rows)]),
    "python": lambda rows: np.array([random.uniform(1, 2) for _ in range(rows)]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_row_gets_the_same_for_any_number_of_rows(name):
    with equal_host_draws():
        many, few = DRAWS[name](8), DRAWS[name](3)

    assert (many == many[:1]).all()
    assert (few == many[:3]).all()
    assert not (DRAWS[name](8) == many).all()


def test_a_permutation_still_moves_rows():
    with equal_host_draws():
        order = np.random.permutation(8)

    assert sorted(order) == list(range(8))
    assert list(order) != list(range(8))


def test_functions_are_put_back():
    before = (random.random, random.shuffle, np.random.randn, np.random.choice)
    with equal_host_draws():
        inside = (random.random, random.shuffle, np.random.randn, np.random.choice)

    assert not set(inside) & set(before)
    assert (random.random, random.shuffle, np.random.randn, np.random.choice) == before
