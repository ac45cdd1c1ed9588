"""All rows of a batch are compared where a check's few rows could not tell."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.facts.carried import CarriedRows
from lightning_unified.step.results.merging import MergeTable
from tests.support.lanes import first_cells
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run


class Recurrent(Net):
    """Goes on from the hidden states of the batch before if it has as many rows."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.hidden = nn.GRUCell(6, 8), nn.Linear(8, 4), None

    def training_step(self, batch, batch_idx):
        rows = len(batch["x"])
        if self.hidden is None or len(self.hidden) != rows:
            self.hidden = torch.zeros(rows, 8).to(batch["x"])
        hidden = self.cell(batch["x"], self.hidden)
        self.hidden = hidden.detach()
        return F.cross_entropy(self.head(hidden), batch["y"])


class Consistent(Recurrent):
    """Keeps the outputs of the batch before in a dict."""

    def training_step(self, batch, batch_idx):
        out, kept = self.net(batch["x"]), self.hidden or {}
        self.hidden = {"out": out.detach()}
        loss = F.cross_entropy(out, batch["y"])
        return loss + F.mse_loss(out, kept["out"]) if kept and len(kept["out"]) == len(out) else loss


@first_cells(1, "kind", [Recurrent, Consistent])
def test_states_of_rows_that_the_next_batch_goes_on_from_are_refused(kind):
    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly: the loss of a batch of 24 rows"):
        run(kind, batches(number=3, size=24), strategy=UnifiedStrategy(micro_batch_size=5))


class EverySecond(Net):
    """Takes the loss of every second row."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"])[::2], batch["y"][::2])


def test_every_second_row_is_refused_before_an_update_of_odd_micro_batches():
    with pytest.raises(SplitError, match="EverySecond cannot be split exactly") as caught:
        run(EverySecond, batches(number=1, size=24), strategy=UnifiedStrategy(micro_batch_size=5))

    assert "although fewer rows agreed" not in str(caught.value)


class Keeping(Net):
    """Keeps its outputs for a hook, and does not read them."""

    def training_step(self, batch, batch_idx):
        self.last = self.net(batch["x"])
        return F.cross_entropy(self.last, batch["y"])


def test_kept_rows_that_no_step_reads_cost_one_check(checks):
    run(Keeping, batches(number=4, size=24), strategy=UnifiedStrategy(micro_batch_size=5))

    assert checks.steps == [0, 1, 3]


class FirstRows(Net):
    """Keeps ten rows of one batch, more than a later check has."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        if batch_idx == 1:
            self.shown = out[:10].detach()
        return F.cross_entropy(out, batch["y"])


class Hardest(FirstRows):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        if batch_idx == 1:
            self.log("hardest", losses.topk(min(10, len(losses))).values.mean())
        return losses.mean()


def test_first_rows_that_a_later_step_keeps_are_refused():
    with pytest.raises(SplitError, match=r"writes FirstRows\.shown"):
        run(FirstRows, batches(number=3, size=24), strategy=UnifiedStrategy(micro_batch_size=5))


def test_a_log_of_a_number_of_rows_that_a_later_step_writes_is_named():
    strategy = UnifiedStrategy(micro_batch_size=5)
    run(Hardest, batches(number=3, size=24), strategy=strategy)

    assert any("'hardest'" in event for event in strategy.events)


class OfKept(Net):
    """Its loss is a mean over rows without outliers: no field tells how many these are."""

    def training_step(self, batch, batch_idx):
        is_kept = batch["x"].abs().amax(1) < 50
        return F.cross_entropy(self.net(batch["x"][is_kept]), batch["y"][is_kept])


def test_a_rule_that_few_rows_find_late_is_refused_where_all_rows_differ():
    def changed(batch, row):
        # of the eight rows of the second check, those that the loss leaves out
        kept = {"kept": int(not batch or row not in (3, 20))}
        return {**kept, "x": torch.full((6,), 100.0, dtype=torch.float64)} if batch and row == 3 else kept

    loader = batches(number=2, size=24, change=changed)
    with pytest.raises(SplitError, match="the loss of a batch of 24 rows"):
        run(OfKept, loader, strategy=UnifiedStrategy(micro_batch_size=5))


def test_only_a_batch_that_follows_at_once_is_known_to_have_as_many_rows():
    table = MergeTable()
    table.note("Net.hidden", "concatenate 0")
    table.note("Net.seen", "sum")
    carried = CarriedRows(table)

    def relation(now, rows):
        ((path, _, found),) = carried.facts(now, rows)
        assert path == "Net.hidden"
        return found

    assert relation((0, 0), 24) == "first"
    assert relation((0, 1), 24) == relation((0, 1), 24) == "as many"
    assert relation((0, 2), 7) == "others"
    assert relation((1, 0), 7) == "as many"
    assert relation((1, 3), 7) == "unknown"
