"""A quotient of two numbers, such as a meter's average, is that of their merged values."""

import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.state.quotients import has_quotient, learn_quotient, quotient_of
from tests.support.modules.plain import fit
from tests.support.modules.writing import Writes


class AverageMeter:
    """The class of PyTorch's ImageNet example."""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Metered(Writes):
    def __init__(self):
        super().__init__()
        self.meters = {"loss": AverageMeter(), "top1": AverageMeter(), "steps": AverageMeter()}

    def write(self, batch, out, loss):
        # seldom right: few rows have none, and write no sum
        right = (out.argmax(1) == batch["y"]) & (batch["x"][:, 0] > 0.8)
        self.meters["loss"].update(loss.item(), len(out))
        self.meters["top1"].update(100 * right.double().mean().item(), len(out))
        self.meters["steps"].update(loss.item())

    def numbers(self):
        return [one for meter in self.meters.values() for one in (meter.val, meter.avg, meter.sum, meter.count)]


class Percent(Writes):
    right = rows = 0
    share = 0.0

    def write(self, batch, out, loss):
        self.right += int((out.argmax(1) == batch["y"]).sum())
        self.rows += len(out)
        self.share = 100 * self.right / self.rows

    def numbers(self):
        return [self.right, self.rows, self.share]


class InDict(Writes):
    def __init__(self):
        super().__init__()
        self.kept = {"sum": torch.tensor(0.0), "rows": 0, "mean": torch.tensor(0.0)}

    def write(self, batch, out, loss):
        kept = self.kept
        kept["sum"] = kept["sum"] + loss * len(out)
        kept["rows"] += len(out)
        kept["mean"] = kept["sum"] / kept["rows"]

    def numbers(self):
        return list(map(float, self.kept.values()))


class Changing(Metered):
    """Divides by something else in the third batch, before which no check is due."""

    def __init__(self):
        super().__init__()
        self.done = [[]]  # a number would be a fact about the module

    def write(self, batch, out, loss):
        super().write(batch, out, loss)
        if len(self.done[0]) == 2:
            self.meters["loss"].avg = self.meters["loss"].sum / (self.meters["loss"].count + 1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.done[0].append(batch_idx)


def trained(kind, strategy="auto"):
    torch.manual_seed(0)
    module = kind().double()
    fit(module, kind.loader(), strategy=strategy)
    return module


@pytest.mark.parametrize("kind", [Metered, Percent, InDict])
def test_averages_of_all_batches_are_the_whole_batchs(kind):
    module = trained(kind, UnifiedStrategy(micro_batch_size=3))

    assert module.numbers() == pytest.approx(trained(kind).numbers())


def test_another_formula_is_refused_at_its_first_batch():
    torch.manual_seed(0)
    module = Changing().double()

    with pytest.raises(SplitError, match=r"writes Changing\.meters\['loss'\]\.avg"):
        fit(module, Changing.loader(), strategy=UnifiedStrategy(micro_batch_size=3))
    assert module.done == [[0, 1]]


RUNS = [{"m.sum": 6.0, "m.rows": 4.0, "m.mean": 1.5}, {"m.sum": 3.0, "m.rows": 1.0, "m.mean": 3.0}]


def merged(**numbers):
    return lambda path: numbers[path.removeprefix("m.")]


def learned():
    table = MergeTable()
    assert learn_quotient(table, "m.mean", RUNS)
    return table


def test_a_quotient_holds_in_every_run_or_is_dropped():
    table = learned()

    assert quotient_of(table, "m.mean", RUNS, merged(sum=7.0, rows=2), like=0.0) == 3.5
    assert not learn_quotient(table, "m.mean", [RUNS[0], {**RUNS[1], "m.mean": 2.9}])
    assert not has_quotient(table, "m.mean")
    assert not learn_quotient(table, "m.mean", RUNS)


def test_a_number_that_no_run_writes_follows_from_the_quotient():
    without_sum = [{"m.rows": 4.0, "m.mean": 1.5}, {"m.rows": 6.0, "m.mean": 1.0}]
    without_rows = [{"m.sum": 6.0, "m.mean": 1.5}, {"m.sum": 8.0, "m.mean": 2.0}]

    assert quotient_of(learned(), "m.mean", without_sum, merged(rows=12), like=0.0) == 0.5
    assert quotient_of(learned(), "m.mean", without_rows, merged(sum=2.0), like=0.0) == 0.5
    for runs in (without_sum, without_rows, [{"m.mean": 1.5}, {"m.mean": 2.0}]):
        with pytest.raises(SplitError, match=r"the step writes m\.mean"):
            quotient_of(
                learned(), "m.mean", [{**run, "m.mean": 7.0 + place} for place, run in enumerate(runs)], merged(), 0.0
            )


def test_a_division_by_zero_is_no_quotient():
    with pytest.raises(SplitError, match=r"the step writes m\.mean"):
        quotient_of(learned(), "m.mean", RUNS, merged(sum=7.0, rows=0), like=0.0)
    assert not learn_quotient(MergeTable(), "m.mean", [{"m.sum": 0.0, "m.rows": 0.0, "m.mean": 0.0}])


def test_objects_of_many_numbers_are_not_searched():
    many = {f"m.{number}": 1.0 for number in range(9)}

    assert not learn_quotient(MergeTable(), "m.mean", [{**many, "m.mean": 1.0}])
