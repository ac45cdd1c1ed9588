"""Splitting a batch loses nothing, copies nothing and gives each row to one micro-batch."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import lightning as L
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_unified import MicroBatchRules, RowRules
from lightning_unified.step.results.by_shape import merge
from lightning_unified.step.split import BatchSplitter, split_rows


def split(batch, start, stop, *, rows):
    rules = MicroBatchRules(rows=RowRules(count=lambda _: rows))
    return BatchSplitter(L.LightningModule(), rules).split(batch, start, stop, rows=rows)


Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    values: torch.Tensor
    names: list
    scale: float


@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 7))
def test_micro_batches_cover_the_batch_evenly_within_the_largest_size(units, limit_units, unit):
    rows, limit = units * unit, limit_units * unit
    sizes = split_rows(rows, micro_batch_size=limit, unit=unit)

    assert sum(sizes) == rows
    assert max(sizes) <= limit or (len(sizes) == 1 and rows <= limit)
    assert all(size % unit == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= unit
    assert len(sizes) == -(-rows // limit)


leaves = st.sampled_from(["tensor", "matrix", "names", "shared tensor", "number", "text", "none"])
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=2), st.dictionaries(st.sampled_from("abc"), children, min_size=1)
    ),
    max_leaves=8,
)


def build(tree, rows):
    if isinstance(tree, list):
        return [build(child, rows) for child in tree]
    if isinstance(tree, dict):
        return {key: build(child, rows) for key, child in tree.items()}
    return {
        "tensor": torch.arange(rows),
        "matrix": torch.randn(rows, 2),
        "names": [f"row {row}" for row in range(rows)],
        "shared tensor": torch.ones(rows + 20),
        "number": 3,
        "text": "abc",
        "none": None,
    }[tree]


def same(left, right) -> bool:
    if isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
    if isinstance(right, list):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return left == right


@given(trees, st.integers(5, 12), st.integers(3, 12))
def test_splitting_and_merging_is_the_identity(tree, rows, limit):
    """The tree's lists are shorter than any micro-batch.

    So none can be mistaken for a list of one entry a row.
    """
    batch = {"anchor": torch.arange(rows), "tree": build(tree, rows)}
    sizes = split_rows(rows, micro_batch_size=limit)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = [split(batch, start, start + size, rows=rows) for start, size in zip(starts, sizes, strict=True)]
    joined = merge(parts, sizes=sizes, average=lambda values: values[0])

    assert same(joined, batch)


def test_tensors_are_views():
    batch = torch.arange(8.0)

    assert split(batch, 2, 5, rows=8).data_ptr() == batch[2:].data_ptr()


def test_containers_keep_their_kind():
    batch = OrderedDict(
        pair=Pair(torch.arange(4), ["a", "b", "c", "d"]),
        record=Record(torch.ones(4, 2), [1, 2, 3, 4], 0.5),
        both=(torch.zeros(4), 7),
    )
    part = split(batch, 1, 3, rows=4)

    assert type(part) is OrderedDict
    assert isinstance(part["pair"], Pair) and part["pair"].right == ["b", "c"]
    assert isinstance(part["record"], Record) and part["record"].names == [2, 3] and part["record"].scale == 0.5
    assert part["both"][1] == 7 and len(part["both"][0]) == 2
    assert batch["record"].names == [1, 2, 3, 4]


def test_a_list_of_one_entry_a_row_is_split_though_its_entries_hold_tensors():
    boxes = [{"boxes": torch.zeros(count, 4)} for count in (1, 2, 7)]
    part = split((torch.zeros(3, 5), boxes), 1, 3, rows=3)

    assert [len(entry["boxes"]) for entry in part[1]] == [2, 7]


def test_a_short_tuple_with_a_tensor_between_numbers_is_no_list_of_samples():
    part = split({"x": torch.zeros(3, 2), "more": (1, torch.arange(3), 2)}, 0, 2, rows=3)

    assert part["more"][0] == 1 and part["more"][1].tolist() == [0, 1] and part["more"][2] == 2
