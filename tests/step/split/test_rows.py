"""The loader and the first batch decide once which entries of a batch have rows."""

import sys
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from lightning_unified import MicroBatchRules, RowRules
from lightning_unified.errors import SplitError
from lightning_unified.step.split import BatchSplitter
from lightning_unified.step.split.samples import UNKNOWN, samples_of


def splitter(loader=None, *, prepare=None, **rules):
    """Return a splitter under a Trainer that fits on `loader`.

    Without a loader the number of samples is unknown.
    """
    module = L.LightningModule()
    if loader is not None:
        trainer = L.Trainer(logger=False, enable_checkpointing=False, barebones=True, accelerator="cpu")
        trainer.fit_loop._combined_loader = L.pytorch.utilities.CombinedLoader(loader)
        module.trainer = trainer
    return BatchSplitter(module, MicroBatchRules(rows=RowRules(**rules), prepare=prepare))


def of(count, total=1000, collate_fn=None):
    return DataLoader(range(total), batch_size=count, collate_fn=collate_fn)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


class Custom(BatchSampler):
    pass


class Index:
    """Names of columns, as pandas holds them: it converts to an array, which it holds."""

    def __init__(self, *names):
        self.values = np.array(names)

    shape = property(lambda self: self.values.shape)

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __getitem__(self, key):
        return self.values[key]


class Table(Dataset):
    """Rows beside the names of their columns."""

    def __init__(self, *names):
        self.columns, self.rows = Index(*names), torch.zeros(18, len(names))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def collated(self, rows):
        return {"rows": torch.stack(rows), "columns": self.columns}


def plain(rows):
    """Collate as users do; nothing tells whether lists are rows or columns."""
    return rows


def halves(one, batch):
    """Return the first half of a batch's rows, in the order of its entries."""
    rows = one.shape(batch).rows
    return one.split(batch, 0, rows // 2, rows=rows)


def test_samplers_tell_the_number_of_samples():
    assert samples_of(of(8, 19)).counts == (8, 3)
    assert samples_of(DataLoader(range(19), batch_size=8, drop_last=True)).counts == (8,)
    assert samples_of(of(8, 3)).counts == (3,)
    assert samples_of(DataLoader(Stream(), batch_size=8)).counts == (8,)


def test_other_samplers_tell_nothing():
    custom = DataLoader(range(19), batch_sampler=Custom(SequentialSampler(range(19)), 8, drop_last=False))
    assert samples_of(custom).counts == ()
    assert samples_of(DataLoader(range(19), batch_size=None)).counts == ()
    assert samples_of([1, 2, 3]) == UNKNOWN


def test_a_shared_tensor_stays_shared_when_a_batch_has_as_many_rows():
    one = splitter(of(8, 19))
    assert halves(one, {"x": torch.zeros(8, 2), "w": torch.zeros(3)})["w"].shape == (3,)

    part = one.split({"x": torch.zeros(3, 2), "w": torch.zeros(3)}, 0, 1, rows=3)
    assert part["x"].shape == (1, 2) and part["w"].shape == (3,)


def test_an_index_of_another_length_is_shared():
    one = splitter(of(8, 18))
    assert halves(one, {"x": torch.zeros(8, 2), "columns": Index("a", "b")})["columns"].shape == (2,)

    part = one.split({"x": torch.zeros(2, 2), "columns": Index("a", "b")}, 0, 1, rows=2)
    assert part["x"].shape == (1, 2) and part["columns"].shape == (2,)


def test_an_index_with_an_entry_a_row_is_refused_unless_the_dataset_holds_it():
    with pytest.raises(
        SplitError, match=r"'columns' .* type Index, whose rows cannot be inferred; .*shared=\('columns',\)"
    ):
        halves(splitter(of(2, 18)), {"x": torch.zeros(2, 2), "columns": Index("a", "b")})

    table = Table("a", "b")
    loader = DataLoader(table, batch_size=2, collate_fn=table.collated)
    part = halves(splitter(loader), next(iter(loader)))
    assert part["rows"].shape == (1, 2) and part["columns"].shape == (2,)


def test_texts_that_a_dataset_holds_are_no_constants_of_numbers():
    table = Table("a", "b")
    table.names = np.array(["red", "blue"])
    labels = torch.tensor([0.5, 1.5])
    assert halves(splitter(DataLoader(table, batch_size=2)), {"x": torch.zeros(2, 2), "y": labels})["y"].tolist() == [
        0.5
    ]


class Bag:
    """Stands for tensordict's `TensorDict`, whose package takes the class for a collection too."""

    @property
    def batch_size(self):
        return (2,)


def bags(indices):
    assert Bag is not None
    return {"x": torch.zeros(len(indices), 2)}


def test_a_class_of_collections_that_a_collate_function_names_is_no_constant(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", SimpleNamespace(is_tensor_collection=lambda one: one is Bag))

    assert halves(splitter(DataLoader(range(4), batch_size=2, collate_fn=bags)), bags([0, 1]))["x"].shape == (1, 2)


def test_a_list_of_columns_stays_one_when_a_batch_has_as_many_rows():
    one = splitter(of(8, 18))
    halves(one, [torch.zeros(8, 2), torch.zeros(8)])
    x, y = one.split([torch.zeros(2, 2), torch.zeros(2)], 0, 1, rows=2)
    assert x.shape == (1, 2) and y.shape == (1,)


def test_a_list_of_ragged_sequences_is_one_entry_a_row():
    one = splitter(of(4, collate_fn=plain))
    assert [len(row) for row in halves(one, [torch.zeros(size) for size in (4, 2, 4, 6)])] == [4, 2]
    assert [len(row) for row in halves(one, [torch.zeros(4) for _ in range(4)])] == [4, 4]


def test_rows_as_long_as_the_batch_are_told_by_the_loaders_collate():
    rows = [torch.zeros(4) for _ in range(4)]
    assert len(halves(splitter(of(4, collate_fn=list)), rows)) == 2
    assert [len(column) for column in halves(splitter(of(4)), rows)] == [2, 2, 2, 2]
    with pytest.raises(SplitError, match="ambiguous"):
        halves(splitter(of(4, collate_fn=plain)), rows)


def test_a_batch_that_was_ambiguous_is_told_by_a_later_one():
    one = splitter(of(4, 19, collate_fn=plain))
    assert one.refusal([torch.zeros(4) for _ in range(4)], 4) is not None
    assert len(one.split([torch.zeros(4) for _ in range(3)], 0, 1, rows=3)) == 1


def test_lists_beside_a_list_of_rows_are_rows():
    """As torchvision's `tuple(zip(*batch))`, with as many images as channels."""
    images, boxes = (torch.zeros(3, 5, 5),) * 3, tuple({"boxes": torch.zeros(count, 4)} for count in (1, 2, 3))
    part = splitter(of(3, collate_fn=plain)).split((images, boxes), 0, 2, rows=3)
    assert [image.shape for image in part[0]] == [(3, 5, 5)] * 2
    assert [len(target["boxes"]) for target in part[1]] == [1, 2]


def test_a_shared_matrix_between_columns_is_shared():
    one = splitter(of(3, collate_fn=plain))
    x, matrix, y = one.split((torch.zeros(3, 6), torch.zeros(6, 6), torch.zeros(3)), 0, 1, rows=3)
    assert (len(x), len(matrix), len(y)) == (1, 6, 1)


def test_fields_of_named_tuples_are_columns_whatever_their_number():
    Pair = namedtuple("Pair", "x y")
    part = splitter(of(2)).split(Pair(torch.zeros(2, 5), torch.zeros(2)), 0, 1, rows=2)
    assert isinstance(part, Pair) and part.x.shape == (1, 5)


def test_a_tensor_that_the_collate_function_names_is_shared():
    weights = torch.tensor([0.1, 1.0, 10.0])

    def collate(rows):
        return {"x": torch.zeros(len(rows), 2), "w": weights}

    batch = {"x": torch.rand(3, 2), "w": weights}
    assert splitter(of(3, collate_fn=collate)).split(batch, 0, 1, rows=3)["w"] is weights
    copied = {**batch, "w": weights.clone()}
    assert len(splitter(of(3, collate_fn=partial(plain, weights))).split(copied, 0, 1, rows=3)["w"]) == 3


def test_the_tensors_of_a_data_set_are_its_rows_and_not_shared():
    data = TensorDataset(torch.rand(4, 2), torch.rand(4))
    x, y = splitter(DataLoader(data, batch_size=4)).split(list(data.tensors), 0, 1, rows=4)
    assert len(x) == len(y) == 1


def test_a_tensor_that_keeps_its_length_is_shared_if_nothing_was_split():
    one = splitter(of(4, 11))
    assert one.shape({"x": torch.zeros(4, 2), "w": torch.zeros(4)}).rows == 4
    later = {"x": torch.zeros(3, 2), "w": torch.zeros(4)}
    assert one.shape(later).rows == 3
    assert len(one.split(later, 0, 1, rows=3)["w"]) == 4


def test_a_tensor_that_keeps_its_length_after_a_split_is_refused_by_name():
    one = splitter(of(4, 11))
    one.micro_batches({"x": torch.zeros(4, 2), "w": torch.zeros(4)}, [2, 2])
    later = {"x": torch.zeros(3, 2), "w": torch.zeros(4)}
    with pytest.raises(SplitError, match=r"x has 3, w has 4\); earlier batches were split along it.*shared=\('w',\)"):
        one.micro_batches(later, [one.shape(later).rows])


def test_entries_that_differ_later_are_refused_by_name():
    one = splitter(of(8, 1000))
    for rows in (8, 6):
        halves(one, {"x": torch.zeros(rows), "y": torch.zeros(rows)})
    with pytest.raises(SplitError, match=r"x has 5, y has 4\)"):
        one.split({"x": torch.zeros(5), "y": torch.zeros(4)}, 0, 2, rows=5)


def test_without_a_known_number_entries_must_agree():
    agreeing = {"x": torch.zeros(5, 2), "y": torch.zeros(5), "once": torch.zeros(1, 2), "names": list("abc")}
    assert splitter().shape(agreeing).rows == 5
    with pytest.raises(SplitError, match=r"ambiguous: x has 5, w has 3.*RowRules\(count=…, shared=\(…\)\)"):
        splitter().split({"x": torch.zeros(5, 2), "w": torch.zeros(3)}, 0, 2, rows=5)
    assert halves(splitter(shared=("w",)), {"x": torch.zeros(5, 2), "w": torch.zeros(3)})["x"].shape == (2, 2)


def test_without_a_known_number_lists_of_rows_are_found():
    assert splitter().shape({"text": ["a", "b", "c"]}).rows == 3
    assert splitter().shape([["a", "b", "c"], ["c", "d", "e"]]).rows == 3
    assert splitter().shape([[torch.zeros(8), torch.zeros(8, 2)], torch.zeros(8)]).rows == 8
    assert splitter().shape({"images": [torch.zeros(3, 4, 4)] * 8, "y": torch.zeros(8)}).rows == 8


def test_the_users_paths_and_counts_win():
    batch = {"x": torch.zeros(4, 2), "inner": {"w": torch.zeros(4)}}
    assert len(splitter(of(4), shared=("inner.w",)).split(batch, 0, 1, rows=4)["inner"]["w"]) == 4
    counted = splitter(of(4), count=lambda batch: 2)
    assert counted.shape({"x": torch.zeros(4, 2), "pairs": torch.zeros(2)}).rows == 2
    assert len(counted.split({"x": torch.zeros(4, 2), "pairs": torch.zeros(2)}, 0, 1, rows=2)["x"]) == 4


def test_a_prepared_batch_may_have_other_rows_than_the_loaders():
    prepared = {"tokens": torch.zeros(12, 5), "mask": torch.zeros(12, 5)}
    assert splitter(of(3), prepare=plain).shape(prepared).rows == 12
    assert splitter(of(8), prepare=plain).shape({"x": torch.zeros(8, 2), "counts": torch.zeros(3)}).rows == 8


def test_a_hook_may_change_the_number_of_rows():
    assert splitter(of(4)).shape([torch.zeros(8, 2), torch.zeros(8)]).rows == 8


def test_objects_of_unknown_classes_are_refused_by_name_when_they_must_be_split():
    one, batch = splitter(of(4)), (torch.zeros(4, 2), SimpleNamespace(names=list("abcd")))
    assert one.shape(batch).rows == 4
    with pytest.raises(SplitError, match=r"entry '1' .* SimpleNamespace.*shared=\('1',\)"):
        one.split(batch, 0, 2, rows=4)
    assert splitter(of(4), shared=("1",)).split(batch, 0, 2, rows=4)[1] is batch[1]
    assert splitter(of(4)).split((torch.zeros(4), SimpleNamespace(scale=2.0)), 0, 2, rows=4)[1].scale == 2.0


def test_a_batch_object_of_an_unknown_class_has_the_loaders_rows():
    one = splitter(of(4))
    assert one.shape(SimpleNamespace(x=torch.zeros(4))).rows == 4
    with pytest.raises(SplitError, match="a batch of LightningModule is of type SimpleNamespace"):
        one.split(SimpleNamespace(x=torch.zeros(4)), 0, 2, rows=4)


def test_a_split_rule_needs_the_exact_number_of_rows():
    one = splitter(of(4), split=lambda batch, start, stop: batch)
    with pytest.raises(SplitError, match="SimpleNamespace"):
        one.require_shape(SimpleNamespace(x=torch.zeros(4)))


def test_sub_batches_of_several_loaders_have_rows_of_their_own():
    one = splitter({"a": of(8, 19), "b": of(8, 18)})
    batch = {name: [torch.zeros(8, 2), torch.zeros(8)] for name in "ab"}
    assert halves(one, batch)["b"][0].shape == (4, 2)
    last = {"a": [torch.zeros(3, 2), torch.zeros(3)], "b": [torch.zeros(2, 2), torch.zeros(2)]}
    assert one.shape(last).rows == 3
    with pytest.raises(SplitError, match=r"a.0 has 3, a.1 has 3, b.0 has 2.*sub-batches of several loaders"):
        one.split(last, 0, 1, rows=3)


def test_a_loader_that_is_used_up_leaves_the_others_rows():
    one = splitter({"a": of(8, 8), "b": of(8, 18)})
    halves(one, {"a": torch.zeros(8), "b": torch.zeros(8)})
    assert one.split({"a": None, "b": torch.zeros(8)}, 0, 2, rows=8)["b"].shape == (2,)


def test_a_failing_count_is_raised_only_when_rows_are_needed():
    one = splitter(count=lambda batch: len(batch["x"]))
    assert one.shape([1, 2]) is None
    with pytest.raises(TypeError, match="list indices"):
        one.require_shape([1, 2])


def test_a_list_of_sub_batches_is_never_a_list_of_rows():
    one = splitter([of(2), of(2)])
    batch = [[torch.zeros(2, 6), torch.zeros(2)], [torch.zeros(2, 6), torch.zeros(2)]]
    (x, y), (other, _) = one.split(batch, 0, 1, rows=2)
    assert (x.shape, y.shape, other.shape) == ((1, 6), (1,), (1, 6))


def test_an_ambiguous_list_is_named_with_the_sizes_of_its_entries():
    graph = (torch.zeros(31, 6), torch.zeros(2, 40), torch.zeros(31))
    with pytest.raises(SplitError, match="ambiguous: 0 has 31, 1 has 2, 2 has 31"):
        splitter(DataLoader([graph], batch_size=None)).split(graph, 0, 1, rows=31)
