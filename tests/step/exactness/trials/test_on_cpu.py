"""A check for which the device lacks memory runs on the CPU, and the log says so."""

import logging
from types import SimpleNamespace

import pytest
import torch

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.group import CheckGroup
from lightning_unified.step.exactness.rows import Check
from lightning_unified.step.exactness.tables import Tables
from lightning_unified.step.exactness.trials.examination import Examination
from lightning_unified.step.recovery.budget_watch import BudgetWatch


def examination(device):
    watch = BudgetWatch("auto")
    watch.device = torch.device(device)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=watch.device), precision_plugin=None)
    return Examination(
        trainer,
        None,
        splitter=None,
        tables=Tables.of(MicroBatchRules().merge),
        fits=lambda rows: None,
        watch=watch,
        group=CheckGroup(),
    )


def check_of(rows):
    return Check(
        kwargs={}, rules=[], rows=rows, unit=1, micro_batch_size=4, most=8, number=0, is_first=False, since=None
    )


@pytest.fixture
def tried(monkeypatch):
    """The units that the device tried in vain."""
    tried = []
    monkeypatch.setattr(Examination, "_tried", lambda self, check, units, take=None: tried.append(units))
    monkeypatch.setattr(Examination, "_recomputed", lambda self, check, units: None)
    return tried


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_check_that_runs_out_of_memory_runs_on_the_cpu_and_says_so(device, tried, monkeypatch, caplog):
    monkeypatch.setattr(Examination, "_on_host", lambda self, check, units: f"on the CPU with {units} units")
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        found = examination(device).findings(check_of(8))

    assert tried == [8, 4, 2]
    assert found == ("memory ran out while it was checked" if device == "cpu" else "on the CPU with 2 units")
    assert ("even with 2 rows. It runs on the CPU now" in caplog.text) == (device == "cuda")


def test_a_later_check_without_memory_anywhere_is_said_once(tried, caplog):
    own = examination("cpu")
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        own.findings(check_of(8))
        own.findings(check_of(8))

    assert caplog.text.count("split as those that were checked before, unchecked") == 1
