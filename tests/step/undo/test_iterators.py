"""Iterators that a step may draw from are put back at their position.

Others are refused by name if a step drew from them.
"""

import collections
import itertools
import sys

import numpy as np
import pytest
import torch
from torch import nn

from lightning_unified.errors import UndoError
from lightning_unified.step.undo import Roots, StateWatch
from tests.step.undo.test_undo import tensors, train
from tests.support.modules.undo import Holds, Plain

OLD = sys.version_info < (3, 14)  # which copies iterators of `itertools` by `__reduce__`


def numbers():
    yield from range(100)


def wide(module):
    """Give the module weights of 64 KiB, so that a budget of 16 MiB is worth a plan."""
    module.wide = nn.Linear(128, 128)
    return module


class Loads:
    """Runs code at each iteration."""

    def __iter__(self):
        return numbers()


def _twice(kind):
    one = iter(range(100))
    return kind(one, one)


RESTORED = {
    "count": lambda: itertools.count(5, 3),
    "count of floats": lambda: itertools.count(0.1, 0.7),
    "count of NumPy integers": lambda: itertools.count(np.int64(3)),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "cycle over a dict": lambda: itertools.cycle({1: "a", 2: "b"}.items()),
    "cycle over an array": lambda: itertools.cycle(np.arange(4)),
    "repeat": lambda: itertools.repeat(3, 20),
    "chain": lambda: itertools.chain([1], (2, 3, 4, 5), range(20)),
    "chain of iterators": lambda: itertools.chain([1, 2], itertools.count(5)),
    "chain from lists": lambda: itertools.chain.from_iterable([[1, 2], [3], [*range(20)]]),
    "islice": lambda: itertools.islice(itertools.count(), 50),
    "product": lambda: itertools.product([1, 2], repeat=5),
    "permutations": lambda: itertools.permutations(range(5)),
    "combinations": lambda: itertools.combinations(range(8), 3),
    "pairwise": lambda: itertools.pairwise(range(20)),
    "zip_longest": lambda: itertools.zip_longest([1], [*range(20)]),
    "compress": lambda: itertools.compress(range(20), itertools.repeat(1)),
    "tee": lambda: itertools.tee(range(20))[0],
    "zip": lambda: zip(itertools.count(), itertools.cycle("ab"), strict=False),
    "zip of one iterator": lambda: _twice(zip),
    "map": lambda: map(str, itertools.count()),
    "filter": lambda: filter(None, [0, 1, 2] * 20),
    "enumerate": lambda: enumerate(itertools.cycle([4, 5])),
    "list": lambda: iter([*range(20)]),
    "reversed": lambda: reversed([*range(20)]),
    "array": lambda: iter(np.arange(20)),
    "dict": lambda: iter(dict.fromkeys(range(20))),
    "deque": lambda: iter(collections.deque(range(20))),
}
REFUSED = {
    "generator": numbers,
    "cycle over a generator": lambda: itertools.cycle(numbers()),
    "chain over an own class": lambda: itertools.chain([1, 2], Loads()),
    "zip with a generator": lambda: zip(numbers(), [*range(20)], strict=False),
    "tee of a generator": lambda: itertools.tee(numbers())[0],
}
(RESTORED if OLD else REFUSED).update(
    {
        "accumulate": lambda: itertools.accumulate(range(20), max),
        "starmap": lambda: itertools.starmap(max, [(1, 2)] * 20),
        "takewhile": lambda: itertools.takewhile(bool, range(1, 20)),
        "map over a cycle": lambda: map(str, itertools.cycle([1, 2, 3])),
    }
)


class Keeper(nn.Module):
    """Holds one iterator in an attribute, in another one, and in a tuple."""

    def __init__(self, iterator):
        super().__init__()
        self.kept, self.also, self.pair = iterator, iterator, (0, iterator)

    def draw(self, times):
        return [next(self.kept) for _ in range(times)]


def watched(module):
    return StateWatch(lambda: Roots([(module, "Keeper")]))


@pytest.mark.parametrize("name", RESTORED)
def test_an_iterator_is_put_back_at_its_position_wherever_it_is_held(name):
    undisturbed, module = RESTORED[name](), Keeper(RESTORED[name]())
    expected = [next(undisturbed) for _ in range(14)]
    state = watched(module)

    assert module.draw(3) == expected[:3]
    for first in (3, 5):
        noted = state.note()
        for _ in range(2):  # a record can be restored more than once
            module.draw(4)
            noted.restore()
        assert module.kept is module.also is module.pair[1]
        assert module.draw(2) == expected[first : first + 2]
    state.note()
    assert [next(module.also), next(module.pair[1])] == expected[7:9]


@pytest.mark.parametrize("name", REFUSED)
def test_an_iterator_that_cannot_be_put_back_is_refused_by_name_if_drawn_from(name):
    undisturbed, module = REFUSED[name](), Keeper(REFUSED[name]())
    state = watched(module)

    noted = state.note()
    noted.restore()
    assert module.draw(3) == [next(undisturbed) for _ in range(3)]
    noted = state.note()
    next(module.pair[1])
    with pytest.raises(UndoError, match=r"had drawn from Keeper\.(kept|also|pair), an? .*on_train_batch_start"):
        noted.restore()


def test_a_generator_keeps_its_methods():
    def echo():
        heard = None
        while True:
            heard = yield heard

    module = Keeper(echo())
    noted = watched(module).note()
    assert next(module.kept) is None
    assert module.kept.send("a") == "a"
    with pytest.raises(UndoError, match=r"Keeper\.kept, a generator"):
        noted.restore()


def test_a_step_that_draws_from_a_generator_is_not_repeated():
    train(lambda: Holds(numbers, next), batch_size=1)
    with pytest.raises(UndoError, match=r"drawn from Holds\.kept, a generator"):
        train(lambda: Holds(numbers, next), at=[3], batch_size=1)
    with pytest.raises(UndoError, match=r"drawn from Holds\.kept, a generator"):  # by the probe
        train(lambda: wide(Holds(numbers, next)), predict=True, simulate="h200", budget="16MiB")


def test_a_generator_that_a_hook_draws_from_loses_no_value_to_a_dry_run():
    class Draws(Plain):
        def __init__(self):
            super().__init__()
            self.numbers, self.number, self.drawn = numbers(), 0, []
            wide(self)

        def draw(self):
            return self.number

        def on_train_batch_start(self, *_):
            self.number = next(self.numbers) / 9
            self.drawn.append(self.number)

    undisturbed, _ = train(Draws, batch_size=1)
    planned, trainer = train(Draws, at=[3], batch_size=1, predict=True, simulate="h200", budget="16MiB")

    assert trainer.strategy.recoveries == 1
    assert "draws from a generator" in trainer.strategy.plan.reasons["prediction"]
    assert planned.drawn == undisturbed.drawn
    assert torch.equal(tensors(planned), tensors(undisturbed))
