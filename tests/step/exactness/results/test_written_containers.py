"""Dicts, lists and sets that a step fills or creates hold the whole batch's values."""

from collections import Counter, defaultdict

import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable, MicroBatchWeights
from lightning_unified.step.results.state.entries import UNWRITTEN, is_known, learn_entry, merge_entry
from lightning_unified.step.undo.changes import ABSENT
from tests.support.lanes import crossed, first_cells
from tests.support.modules.plain import fit
from tests.support.modules.writing import Writes

PARTS = MicroBatchWeights([3, 3, 2], [3.0, 3.0, 2.0])


def count(kept, batch, out):
    kept.update(batch["y"].tolist())


def count_in_dict(kept, batch, out):
    for label in batch["y"].tolist():
        kept[label] = kept.get(label, 0) + 1


def add_losses(kept, batch, out):
    for label, row in zip(batch["y"].tolist(), out, strict=True):
        kept[label] = kept.get(label, 0) + row.sum()


def list_by_label(kept, batch, out):
    for label, row in zip(batch["y"].tolist(), out, strict=True):
        kept.setdefault(label, []).append(float(row.sum()))


def nest(kept, batch, out):
    inner = kept.setdefault("train", {})
    inner["rows"] = inner.get("rows", 0) + len(out)


FILLED = {
    "a Counter": (Counter, count),
    "counts in a dict": (dict, count_in_dict),
    "a defaultdict": (lambda: defaultdict(int), count_in_dict),
    "sums by label": (dict, add_losses),
    "lists by label": (dict, list_by_label),
    "a dict in a dict": (dict, nest),
    "a set": (set, count),
    "a list": (list, lambda kept, batch, out: kept.extend(batch["y"].tolist())),
}


class Fills(Writes):
    """Fills a container that is there, or makes it in its first step."""

    make, fill, is_lazy = None, None, False

    def __init__(self):
        super().__init__()
        if not self.is_lazy:
            self.kept = type(self).make()

    def write(self, batch, out, loss):
        if not hasattr(self, "kept"):
            self.kept = type(self).make()
        type(self).fill(self.kept, batch, out)


def kept_by(make, fill, *, is_lazy, strategy):
    kind = type("Filling", (Fills,), {"make": staticmethod(make), "fill": staticmethod(fill), "is_lazy": is_lazy})
    torch.manual_seed(0)
    module = kind().double()
    fit(module, kind.loader(), strategy=strategy, max_epochs=2)
    return module.kept


def comparable(kept):
    """Return numbers rounded, and lists in sorted order.

    Rows of one label may come in the order of micro-batches.
    """
    if isinstance(kept, dict):
        return {name: comparable(value) for name, value in sorted(kept.items())}
    if isinstance(kept, (list, set)):
        return sorted(round(float(value), 6) for value in kept)
    return round(float(kept), 6)


@first_cells(
    2,
    ("name", "is_lazy"),
    crossed(FILLED, [False, True], fast=[*((name, False) for name in FILLED), ("counts in a dict", True)]),
)
def test_a_container_holds_what_the_whole_batch_writes(name, is_lazy):
    make, fill = FILLED[name]
    plain = kept_by(make, fill, is_lazy=is_lazy, strategy="auto")
    split = kept_by(make, fill, is_lazy=is_lazy, strategy=UnifiedStrategy(micro_batch_size=3))

    assert type(split) is type(plain)
    assert comparable(split) == comparable(plain)


def count_in_halves(kept, batch, out):
    for value in batch["x"][:, 0].mul(2).round().int().tolist():
        kept[value] = kept.get(value, 0) + 1


@pytest.mark.parametrize("size", [1, 3])
def test_new_entries_have_the_order_of_the_rows(size):
    plain = kept_by(dict, count_in_halves, is_lazy=False, strategy="auto")
    split = kept_by(dict, count_in_halves, is_lazy=False, strategy=UnifiedStrategy(micro_batch_size=size))

    assert len(plain) > 4
    assert list(split.items()) == list(plain.items())


class EveryThird(Writes):
    """Logs the mean loss of three batches, and then empties its list of losses, or makes a new one."""

    is_new = False

    def __init__(self):
        super().__init__()
        self.losses = []

    def write(self, batch, out, loss):
        self.losses.append(float(loss))
        if len(self.losses) == 3:
            self.log("of three", sum(self.losses) / 3)
            self.losses = [] if self.is_new else self.losses.clear() or self.losses


@pytest.mark.parametrize("is_new", [False, True])
def test_a_list_that_steps_fill_and_empty_in_turn_is_the_whole_batchs(is_new):
    kind = type("Emptying", (EveryThird,), {"is_new": is_new})

    def trained(strategy):
        torch.manual_seed(0)
        module = kind().double()
        seen, _ = fit(module, kind.loader(), strategy=strategy, max_epochs=4)
        return module.losses, [one.get("of three") for one in seen.callback_metrics]

    losses, logged = trained("auto")
    kept, ours = trained(UnifiedStrategy(micro_batch_size=3))

    assert len(losses) == len(kept) and kept == pytest.approx(losses)
    assert [one for one in ours if one] == pytest.approx([one for one in logged if one])


def learned(*checks):
    """Return the rules that checks of an entry teach.

    Each check has the value before, the whole batch's and the micro-batches'.
    """
    table = MergeTable()
    for before, whole, values in checks:
        assert learn_entry(table, "kept['a']", before, whole, values, PARTS, tolerance=1e-6) == []
    return table


def test_absent_counts_as_nothing():
    table = learned((ABSENT, 3, [1, UNWRITTEN, 2]))

    assert merge_entry(table, "kept['a']", 5, [6, UNWRITTEN, 7], PARTS) == 8
    assert merge_entry(table, "kept['b']", ABSENT, [1, 1, UNWRITTEN], PARTS) == 2


def test_one_writer_may_count_or_write_so_that_two_alike_are_refused():
    table = learned((ABSENT, 1, [1, UNWRITTEN, UNWRITTEN]))

    assert merge_entry(table, "kept['b']", ABSENT, [UNWRITTEN, UNWRITTEN, 4], PARTS) == 4
    with pytest.raises(SplitError, match=r"the step writes kept\['b'\]"):
        merge_entry(table, "kept['b']", ABSENT, [1, 1, UNWRITTEN], PARTS)


def test_a_sum_from_zero_is_learnt_again_once_it_is_not_zero():
    table = learned((ABSENT, 7, [3, 3, 1]))

    assert is_known(table, "kept['a']", 0)
    assert not is_known(table, "kept['a']", 7)
    assert merge_entry(learned((ABSENT, 7, [3, 3, 1]), (7, 6, [2, 3, 1])), "kept['a']", 6, [2, 2, 1], PARTS) == 5
    assert merge_entry(learned((ABSENT, 7, [3, 3, 1]), (7, 9, [8, 8, 7])), "kept['a']", 9, [10, 10, 9], PARTS) == 11


def test_lists_of_several_writers_are_joined_unless_they_are_alike():
    table = learned(([], ["x"], [["x"], UNWRITTEN, UNWRITTEN]))

    assert merge_entry(table, "kept['a']", [], [["x"], ["y"], UNWRITTEN], PARTS) == ["x", "y"]
    with pytest.raises(SplitError, match="the step writes"):
        merge_entry(table, "kept['a']", [], [["x"], ["x"], UNWRITTEN], PARTS)
