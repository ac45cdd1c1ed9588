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


def examination(device):
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer = SimpleNamespace(strategy=strategy, precision_plugin=None)
    return Examination(
        trainer,
        None,
        splitter=None,
        tables=Tables.of(MicroBatchRules().merge),
        fits=lambda rows: None,
        group=CheckGroup(),
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_check_that_runs_out_of_memory_runs_on_the_cpu_and_says_so(device, monkeypatch, caplog):
    tried = []
    monkeypatch.setattr(Examination, "_tried", lambda self, check, units, take=None: tried.append(units))
    monkeypatch.setattr(Examination, "_recomputed", lambda self, check, units: None)
    monkeypatch.setattr(Examination, "_on_host", lambda self, check, units: f"on the CPU with {units} units")
    check = Check(kwargs={}, rules=[], rows=8, unit=1, micro_batch_size=4, most=8, number=0, is_first=False, since=None)
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        found = examination(device).findings(check)

    assert tried == [8, 4, 2]
    assert found == ("memory ran out while it was checked" if device == "cpu" else "on the CPU with 2 units")
    assert ("even with 2 rows. It runs on the CPU now" in caplog.text) == (device == "cuda")
