"""Results are compared again when micro-batches first reach a level that a step holds."""

import pytest
import torch
from torch.nn import functional as F

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.facts.bends import LossBends, are_mixed
from lightning_unified.step.exactness.facts.levels import Levels, name_of
from tests.support.lanes import first_cells
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run


class Logs(Net):
    """Logs a figure of the costs; only the last micro-batch of batch 9 has a large one."""

    def loss(self, out, batch):
        self.log("figure", self.figure(batch["cost"].mean()))
        return F.cross_entropy(out, batch["y"])


class Clamped(Logs):
    def figure(self, cost):
        return cost.clamp(max=1.5)


class ZeroBeyond(Logs):
    def figure(self, cost):
        return cost if cost < 1.5 else torch.zeros_like(cost)


class Returned(Net):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        return {"loss": loss, "figure": batch["cost"].mean().clamp(max=1.5)}


def loader(*, large=5.0):
    costs = torch.rand(13 * 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4 + 0.8
    costs[9 * 8 + 7] = large
    return batches(number=13, size=8, change=lambda batch, row: {"cost": costs[8 * batch + row]})


@first_cells(1, "kind", [Clamped, ZeroBeyond, Returned])
def test_a_figure_that_first_reaches_a_level_is_checked_and_named(kind, checks, caplog):
    run(kind, loader())

    assert checks.steps == [0, 1, 3, 7, 9]
    assert any("figure" in record.message for record in caplog.records)


class Written(Net):
    """Keeps the figure in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros((), dtype=torch.float64))
        self.last = 0.0

    def loss(self, out, batch):
        self.level.copy_(batch["cost"].mean().clamp(max=1.5))
        self.last = float(self.level)
        return F.cross_entropy(out, batch["y"])


@pytest.mark.slow
def test_a_written_figure_that_first_reaches_a_level_is_refused_before_the_update(checks):
    with pytest.raises(SplitError, match="Written writes Written"):
        run(Written, loader())

    assert checks.steps[-1] == 9


@first_cells(1, "kind", [Clamped, Returned, Written])
def test_a_figure_below_its_level_costs_no_check(kind, checks, caplog):
    run(kind, loader(large=1.0))

    assert checks.steps == [0, 1, 3, 7]
    assert not any("figure" in record.message for record in caplog.records)


EVEN = [(3.0, 3), (3.0, 3), (3.0, 3)]


@pytest.mark.parametrize(
    ("numbers", "level"),
    [
        ([0.317, 0.521, 0.433], None),
        ([0.317, 0.317, 0.317], None),
        ([0.317, 0.521, 0.521], "held"),
        ([0.317, 0.5, 0.433], "held"),
        ([1 / 3, 1.0, 1 / 3], None),  # a share of three rows
        ([1 / 3, float("nan"), 1 / 3], None),
        ([0.317, float("inf"), 0.5], "held"),
        ([float("nan"), 0.433, float("nan")], None),
    ],
)
def test_equal_and_round_numbers_tell_a_level_unless_they_are_shares_of_rows(numbers, level):
    assert Levels().of("log a", numbers, EVEN) == level


class AccuracyOfMarked(Net):
    """Logs a mean that is NaN in micro-batches without a marked row."""

    def loss(self, out, batch):
        self.log("marked", (out.argmax(1) == batch["y"])[batch["mark"]].to(out).mean())
        return F.cross_entropy(out, batch["y"])


def test_a_log_that_is_nan_in_some_micro_batches_is_no_error():
    marked = batches(number=4, size=8, change=lambda batch, row: {"mark": torch.tensor(row < 3 + batch)})
    _, trainer = run(AccuracyOfMarked, marked)

    assert trainer.global_step == 4


def test_the_largest_number_of_a_batch_before_tells_a_level():
    levels = Levels()

    assert levels.of("log a", [0.317, 0.521, 0.433], EVEN) is None
    assert levels.of("log a", [0.417, 0.521, 0.499], EVEN) == "held"


def test_flags_that_merge_by_an_extreme_tell_the_share_of_rows_that_sets_them():
    levels, counts = Levels(), [(1.0, 1), (2.0, 2), (5.0, 5)]

    assert [levels.of("log a: max", flags, counts) for flags in ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0])] == [
        "1 of 4",
        "3 of 4",
    ]
    assert levels.of("log a: min", [0.0, 1.0, 1.0], counts) == "1 of 4"
    assert levels.of("log a: max", [0.317, 0.521, 0.433], counts) is None
    assert (name_of("log a", {"max"}), name_of("log a", {"max", "mean"})) == ("log a: max", "log a")


def test_numbers_that_some_micro_batches_lack_tell_nothing():
    bends, loss = LossBends(), torch.ones((), requires_grad=True).exp()
    for numbers in ({"log a": torch.tensor(0.5)}, {"log a": torch.tensor(0.7), "log b": torch.tensor(0.5)}):
        bends.add(loss, numbers=numbers)

    assert {path for path, _, _ in bends.facts()} == {"the loss", "log a"}
    assert are_mixed(bends.facts())
