"""Loss terms of a moved batch are counted on the host, so that nothing waits for the device."""

import pytest
import torch
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.step.exactness.facts.figures import HostFigures
from lightning_unified.step.exactness.facts.terms import Terms
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run

BATCH = {"x": torch.randn(8, 6), "labels": torch.arange(8) % 4}


def moved(batch):
    return {name: value.clone() for name, value in batch.items()}


def noted(host, device):
    figures = HostFigures()
    figures.note(host, device)
    return figures


def test_a_moved_batch_is_kept_on_the_host_until_the_next_one():
    device = moved(BATCH)
    figures = noted(BATCH, device)
    assert figures.batch_on_host(device) is BATCH

    figures.note(BATCH, moved(BATCH))
    assert figures.batch_on_host(device) is None


@pytest.mark.parametrize("change", ["written", "written on the host", "replaced", "more", "large"])
def test_a_batch_that_may_differ_from_the_host_is_read_on_the_device(change, monkeypatch):
    if change == "large":
        monkeypatch.setattr("lightning_unified.step.exactness.facts.figures._MOST_ON_HOST", 10)
    host = moved(BATCH)
    device = moved(host)
    figures = noted(host, device)
    if change == "written":
        device["labels"][0] = 3
    if change == "written on the host":
        host["labels"][0] = 3
    if change == "replaced":
        device["labels"] = device["labels"].clone()
    if change == "more":
        device["weight"] = torch.ones(8)

    assert figures.batch_on_host(device) is None


class Scored(Net):
    def loss(self, out, batch):
        return F.cross_entropy(out, batch["labels"])


def test_between_checks_loss_terms_are_counted_on_the_host(monkeypatch):
    """Batch 7 has no check: its terms are counted without a look at the moved batch."""

    def loader():
        return batches(number=7, change=lambda batch, row: {"labels": -100 if row % 3 == batch % 3 else row % 4})

    expected, _ = run(Scored, loader())
    on_device, read, count = [], [], Terms.__call__

    def move(self, batch, *args, **kwargs):
        on_device.append(moved(batch))
        self._loop.batch_moved(batch, on_device[-1])
        return on_device[-1]

    def noted_count(self, micro_batch):
        memory = micro_batch["labels"].untyped_storage().data_ptr()
        read.append((len(on_device), memory == on_device[-1]["labels"].untyped_storage().data_ptr()))
        return count(self, micro_batch)

    monkeypatch.setattr(UnifiedStrategy, "batch_to_device", move)
    monkeypatch.setattr(Terms, "__call__", noted_count)
    got, _ = run(Scored, loader())

    of_batch_7 = [is_moved for batch, is_moved in read if batch == 7]
    assert of_batch_7 and not any(of_batch_7)
    torch.testing.assert_close(weights(got), weights(expected))
