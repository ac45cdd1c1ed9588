"""An object that a split step makes and keeps holds what the whole batch would have given."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils.rnn import pack_sequence

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.results.objects import attributes_of
from tests.support.modules.plain import fit
from tests.support.modules.writing import Writes


class Slots:
    __slots__ = ("out", "rows")

    def __init__(self, out, rows):
        self.out, self.rows = out, rows


class State:
    """An object with its own constructor, another object and a shape."""

    def __init__(self, out):
        self.inner, self.shape, self.name = Slots(out, len(out)), out.shape, "state"


MADE = {
    "normal": (lambda out: Normal(out, 1.0), lambda kept: kept.mean),
    "independent": (lambda out: Independent(Normal(out, out.exp()), 1), lambda kept: kept.base_dist.scale),
    "categorical": (lambda out: Categorical(logits=out), lambda kept: kept.entropy()),
    "namespace": (lambda out: SimpleNamespace(out=out, rows=len(out)), lambda kept: kept.out * kept.rows),
    "state": (State, lambda kept: kept.inner.out * kept.inner.rows * kept.shape[0]),
    "in a dict": (lambda out: {"state": State(out)}, lambda kept: kept["state"].inner.out),
    "deque": (lambda out: deque([out], maxlen=1), lambda kept: kept[-1]),
    "shape": (lambda out: out.shape, lambda kept: torch.tensor(kept)),
    "shape in a tensor": (lambda out: torch.tensor(out.shape), lambda kept: kept),
}


class Keeps(Writes):
    """Keeps what `make` returns, and reads it after the step."""

    def __init__(self, name):
        super().__init__()
        self.make, self.read = MADE[name]
        self.seen = []

    def write(self, batch, out, loss):
        self.kept = self.make(out)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.read(self.kept))


def trained(strategy, module, seed=0):
    torch.manual_seed(seed)
    module.double()
    fit(module, module.loader(), strategy=strategy)
    return module


@pytest.mark.parametrize("name", MADE)
def test_an_object_that_the_step_keeps_is_that_of_the_whole_batch(name):
    torch.manual_seed(0)
    plain = trained("auto", Keeps(name)).seen
    torch.manual_seed(0)
    split = trained(UnifiedStrategy(micro_batch_size=3), Keeps(name)).seen

    assert len(plain) == len(split) > 1
    for one, other in zip(plain, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class KeepsItself(Writes):
    """Chooses one of its own objects, which stays that very object."""

    def __init__(self):
        super().__init__()
        self.choices = [SimpleNamespace(weight=1.0), SimpleNamespace(weight=1.0)]

    def write(self, batch, out, loss):
        self.kept = self.choices[1]


def test_an_object_that_the_step_does_not_make_stays_the_same_object():
    module = trained(UnifiedStrategy(micro_batch_size=3), KeepsItself())

    assert module.kept is module.choices[1]


class KeepsPacked(Writes):
    def write(self, batch, out, loss):
        self.kept = pack_sequence(list(out))


class KeepsSpread(Writes):
    def write(self, batch, out, loss):
        self.kept = SimpleNamespace(spread=float(out.std()))


@pytest.mark.parametrize("kind", [KeepsPacked, KeepsSpread])
def test_an_object_whose_attributes_fit_no_rule_is_refused(kind):
    with pytest.raises(SplitError, match=rf"writes {kind.__name__}\.kept in its step"):
        trained(UnifiedStrategy(micro_batch_size=3), kind())


def test_objects_that_hold_themselves_or_more_than_values_are_not_read():
    own, held = SimpleNamespace(value=1), SimpleNamespace(entries=iter([1]))
    own.itself = own

    assert attributes_of(SimpleNamespace(value=1)) == [("value", 1)]
    assert attributes_of(own) is None
    assert attributes_of(held) is None
    assert attributes_of(SimpleNamespace(many=[SimpleNamespace(value=one) for one in range(1000)])) is None
    assert attributes_of(torch.ones(2)) is None
