"""Progress that a step reads, and changes of its module, make a batch need a check.

The batch itself shows nothing of them.
"""

from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_unified.step.exactness.facts.progress import Counters, ModuleFacts, OutsideFacts, WatchedIndex


class Settings:
    def __init__(self):
        self.is_warm = True


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.alpha, self.calls, self.mode, self.flag = nn.Linear(2, 2), 0.5, 3, "warm", False
        self.settings, self.own = SimpleNamespace(weight=0.0), Settings()
        self.save_hyperparameters({"margin": 0.5})
        self.register_buffer("steps", torch.tensor(3))


@pytest.mark.parametrize(
    ("use", "read"),
    [
        (lambda module, index: module.current_epoch, {"epoch"}),
        (lambda module, index: module.trainer.current_epoch, {"epoch"}),
        (lambda module, index: module.global_step, {"step"}),
        (lambda module, index: module.trainer.global_step > 3, {"step"}),
        (lambda module, index: module.optimizers(), {"rates"}),
        (lambda module, index: module.trainer.callback_metrics, {"metrics"}),
        (lambda module, index: index % 2, {"batch"}),
        (lambda module, index: index == 0, {"batch"}),
        (lambda module, index: bool(index), {"batch"}),
        (lambda module, index: module(index), set()),
        (lambda module, index: index in {5, 9}, {"batch"}),
        (lambda module, index: int(index), {"batch"}),
        (lambda module, index: index & 7, {"batch"}),
        (lambda module, index: 5 - index, {"batch"}),
        (lambda module, index: f"{index}", {"batch"}),
        (lambda module, index: None, set()),
    ],
)
def test_counters_that_a_step_reads_are_noted(use, read):
    counters, module = Counters(), Module()
    module.forward = lambda index: index
    module.trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    before = [(owner, vars(owner)["current_epoch"]) for owner in (L.LightningModule, L.Trainer)]

    with counters.watching():
        use(module, WatchedIndex(4, counters))

    assert counters.read == read
    assert [(owner, vars(owner)["current_epoch"]) for owner in (L.LightningModule, L.Trainer)] == before


def test_an_index_counts_as_the_number_it_is():
    index = WatchedIndex(7, Counters())

    assert (index, index % 4, index // 2, index + 1, hash(index), f"{index}") == (7, 3, 3, 8, hash(7), "7")
    assert torch.arange(9)[index] == 7


@pytest.mark.parametrize("counter", ["epoch", "step", "batch"])
def test_only_counters_that_were_read_are_facts(counter):
    counters = Counters()
    assert counters.facts(epoch=1, step=2, batch=3) == frozenset()

    counters.read.add(counter)

    assert len(counters.facts(epoch=1, step=2, batch=3)) == 1


def test_epochs_are_each_news_and_steps_ever_more_rarely():
    counters = Counters()
    counters.read |= {"step"}
    steps = [counters.facts(epoch=0, step=step, batch=0) for step in range(64)]
    counters.read = {"epoch"}
    epochs = [counters.facts(epoch=epoch, step=0, batch=0) for epoch in range(64)]

    assert (len(set(steps)), len(set(epochs))) == (20, 64)


@pytest.mark.parametrize("period", [20, 32, 50, 96])
def test_no_period_of_steps_is_always_missed(period):
    counters = Counters()
    counters.read |= {"step"}
    facts = [counters.facts(epoch=0, step=step, batch=0) for step in range(100 * period)]
    news = {step for step in range(1, len(facts)) if facts[step] != facts[step - 1]}

    assert all(any((step + phase) % period == 0 for step in news) for phase in range(period))
    assert len(news) <= 16 + len(facts) / 16


@pytest.mark.parametrize(("read", "known"), [("rates", "rate 0"), ("metrics", "metric loss")])
def test_rates_and_metrics_that_were_read_are_facts(read, known):
    counters, trainer = Counters(), L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.strategy.optimizers = [torch.optim.SGD([torch.zeros(1)], 0.1)]
    trainer.callback_metrics["loss"] = torch.tensor(0.5)
    assert counters.figures(trainer) == frozenset()

    counters.read.add(read)

    assert [name for _, name, _ in counters.figures(trainer)] == [known]


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.flag = True


def freeze(module):
    module.net.bias.requires_grad_(False)


CHANGES = {
    "a frozen parameter": (freeze, True),
    "another mode": (lambda module: module.net.eval(), True),
    "a submodule with a flag": (lambda module: setattr(module, "other", Flagged()), True),
    "a submodule in place of another": (lambda module: setattr(module, "net", nn.Linear(4, 4).eval()), True),
    "a flag": (lambda module: setattr(module, "flag", True), True),
    "an entry of a list": (lambda module: setattr(module, "weights", [0.0, 1.0]), True),
    "a scalar tensor": (lambda module: setattr(module, "beta", torch.tensor(1.0)), True),
    "a word": (lambda module: setattr(module, "mode", "hot"), True),
    "a number that becomes 0": (lambda module: setattr(module, "alpha", 0.0), True),
    "a number of another order": (lambda module: setattr(module, "calls", 16), True),
    "a number of NumPy": (lambda module: setattr(module, "alpha", np.float64(-0.5)), True),
    "a number of another sign": (lambda module: setattr(module, "alpha", -0.5), True),
    "a number in a namespace": (lambda module: setattr(module.settings, "weight", 1.0), True),
    "another namespace": (lambda module: setattr(module, "settings", SimpleNamespace(weight=1.0)), True),
    "a flag of a settings object": (lambda module: setattr(module.own, "is_warm", False), True),
    "a hyperparameter": (lambda module: module.hparams.update(margin=2.0), True),
    "a counter in a buffer": (lambda module: module.steps.add_(1), True),
    "a number that is not finite": (lambda module: setattr(module, "alpha", float("inf")), True),
    "a number of the same order": (lambda module: setattr(module, "calls", 2), False),
    "weights": (lambda module: nn.init.ones_(module.net.weight), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_module_are_news(name):
    change, is_news = CHANGES[name]
    module = Module()
    facts = ModuleFacts(module)
    before = facts.now()

    change(module)

    assert bool(facts.now() - before) is is_news
    assert facts.now() == ModuleFacts(module).now()


def test_a_setting_in_a_dict_of_the_module_is_news():
    module = Module()
    module.switches = {"mixes": False}
    facts = ModuleFacts(module)
    before = facts.now()

    module.switches["mixes"] = True

    assert facts.now() - before == {("holder switches.mixes", "attribute", True)}


SWITCHES, IS_ON, SETTINGS = {"mixes": False}, False, SimpleNamespace(weight=0.0)


def stepping():
    warm = 0.0

    class Steps(nn.Module):
        def training_step(self, batch, batch_idx):
            return SWITCHES["mixes"], IS_ON, SETTINGS.weight, warm

    def heat():
        nonlocal warm
        warm = 1.0

    return Steps(), heat


@pytest.mark.parametrize("name", ["an entry of a global dict", "a global", "an attribute of a global", "a closure's"])
def test_changes_of_what_the_step_names_outside_the_module_are_news(name, monkeypatch):
    module, heat = stepping()
    facts = OutsideFacts(module)
    before = facts.now()

    if name == "an entry of a global dict":
        monkeypatch.setitem(SWITCHES, "mixes", True)
    elif name == "a global":
        monkeypatch.setitem(globals(), "IS_ON", True)
    elif name == "an attribute of a global":
        monkeypatch.setattr(SETTINGS, "weight", 0.5)
    else:
        heat()

    assert len(facts.now() - before) == 1
