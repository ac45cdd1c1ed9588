"""State that differs between two equal runs, such as times, and state that only seems to."""

import time

import pytest
import torch
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.tables import Tables
from tests.support.modules.plain import fit
from tests.support.modules.writing import Writes


class SpreadOfDropout(Writes):
    """A standard deviation over rows, of features with dropout."""

    spread = 1.0

    def training_step(self, batch, batch_idx):
        out = F.dropout(self.net(batch["x"]), 0.2, self.training)
        self.spread = float(out.detach().std())
        return F.cross_entropy(out, batch["y"])


class SpreadOfLayer(SpreadOfDropout):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.2)

    def training_step(self, batch, batch_idx):
        out = self.net(self.drop(batch["x"]))
        self.spread = float(out.detach().std())
        return F.cross_entropy(out, batch["y"])


@pytest.mark.parametrize("kind", [SpreadOfDropout, SpreadOfLayer])
def test_state_that_differs_with_the_noise_only_is_refused(kind):
    torch.manual_seed(0)
    module = kind().double()

    with pytest.raises(SplitError, match=rf"writes {kind.__name__}\.spread in its step"):
        fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=3))


class Timed(Writes):
    """Keeps the time of each step with its loss, and a function of the batch."""

    def __init__(self):
        super().__init__()
        self.steps, self.validated, self.losses = [], [], []

    def write(self, batch, out, loss):
        self.steps.append(time.perf_counter_ns() % 1_000_003)
        self.last = (time.perf_counter_ns() % 1_000_003, loss.detach())
        self.again = lambda: out.mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(self.last[1])

    def val_dataloader(self):
        return self.loader()

    def validation_step(self, batch, batch_idx):
        self.validated.append(time.perf_counter_ns() % 1_000_003)


def timed(strategy):
    torch.manual_seed(0)
    module = Timed().double()
    fit(module, module.loader(), strategy=strategy)
    return module


def test_times_are_kept_once_a_batch_and_what_varies_is_said():
    plain = timed("auto")
    strategy = UnifiedStrategy(micro_batch_size=3, evaluation_micro_batch_size=3)
    split = timed(strategy)

    torch.testing.assert_close(split.losses, plain.losses, rtol=1e-9, atol=1e-12)
    assert len(split.steps) == len(plain.steps)
    assert len(split.validated) == len(plain.validated)
    said = [event for event in strategy.events if "differs between equal runs" in str(event)]
    names = ("training_step writes Timed.steps", "Timed.last", "Timed.again", "validation_step writes Timed.validated")
    assert all(sum(name in str(event) for event in said) == 1 for name in names)


class TimedSpread(Writes):
    def write(self, batch, out, loss):
        self.last = (time.perf_counter_ns() % 1_000_003, float(out.std()))


def test_a_time_beside_it_does_not_hide_state_that_no_rule_merges():
    torch.manual_seed(0)
    module = TimedSpread().double()

    with pytest.raises(SplitError, match=r"writes TimedSpread\.last in its step"):
        fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=3))


def test_state_that_varies_is_in_checkpoints():
    tables, other = Tables(), Tables()
    tables.varying.add("Timed.steps")
    other.load_state_dict(tables.state_dict())

    assert other.varying == {"Timed.steps"}


class TimedDict(Writes):
    def write(self, batch, out, loss):
        self.made = {"seconds": time.perf_counter_ns() % 1_000_003, "loss": loss.detach()}


def test_a_time_in_a_dict_is_the_last_one():
    modules = []
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=3)):
        torch.manual_seed(0)
        modules.append(TimedDict().double())
        fit(modules[-1], modules[-1].loader(), strategy=strategy)

    plain, split = modules
    torch.testing.assert_close(split.made["loss"], plain.made["loss"], rtol=1e-9, atol=1e-12)
    assert split.made.keys() == plain.made.keys()
