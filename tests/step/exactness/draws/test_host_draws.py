"""Draws by Python and NumPy can be made equal for every row, and are restored afterwards."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.draws.host import equal_host_draws
from tests.support.modules.plain import fit
from tests.support.modules.split import Net

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


class Own(nn.Module):
    """Holds generators of its own."""

    def __init__(self):
        super().__init__()
        self.numpy, self.legacy, self.python = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)


OWN = {
    "Generator": lambda own, rows: own.numpy.normal(size=(rows, 3)),
    "integers": lambda own, rows: own.numpy.integers(0, 99, rows),
    "RandomState": lambda own, rows: own.legacy.rand(rows, 3),
    "Random": lambda own, rows: np.array([own.python.gauss(0, 1) for _ in range(rows)]),
}


@pytest.mark.parametrize("name", OWN)
def test_generators_of_a_module_give_every_row_the_same(name):
    own, twin = Own(), Own()
    with equal_host_draws(own):
        many, few = OWN[name](own, 8), OWN[name](own, 3)

    assert (many == many[:1]).all()
    assert (few == many[:3]).all()
    assert (OWN[name](own, 8) == OWN[name](twin, 8)).all()


class NoisyRows(Net):
    """Adds noise to each row, drawn from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def noisy(self, x):
        return x + 0.1 * torch.from_numpy(self.rng.normal(size=tuple(x.shape)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(self.noisy(batch["x"])), batch["y"])


class MixedRows(NoisyRows):
    def noisy(self, x):
        return x[torch.from_numpy(self.rng.permutation(len(x)))] + x


def test_noise_from_a_generator_of_its_own_is_said():
    strategy = UnifiedStrategy(micro_batch_size=3)
    fit(NoisyRows().double(), NoisyRows.loader(), strategy=strategy)

    assert any("its step draws from NoisyRows.rng" in str(event) for event in strategy.events)


def test_rows_mixed_by_a_generator_of_its_own_are_refused_with_the_way_out():
    with pytest.raises(
        SplitError, match=r"its step draws from MixedRows\.rng.*draw in prepare or on_after_batch_transfer"
    ):
        fit(MixedRows().double(), MixedRows.loader(), strategy=UnifiedStrategy(micro_batch_size=3))
