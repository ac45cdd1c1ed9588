"""Fake batches are of the size asked for and of the kind of the real one."""

from dataclasses import dataclass

import lightning as L
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_unified import MicroBatchRules, RowRules
from lightning_unified.errors import DryRunError
from lightning_unified.planner.dry_run.fake_batch import Template
from lightning_unified.planner.fake.known_values import value_of
from lightning_unified.planner.fake.mode import fake_world

CPU = torch.device("cpu")


def made(batch, rows, *, length=None, rules=None):
    with fake_world():
        return Template(L.LightningModule(), batch, rules or MicroBatchRules()).of(rows, length=length, device=CPU)


def test_rows_are_repeated_with_their_whole_numbers():
    fake = made({"x": torch.randn(2, 3), "y": torch.tensor([4, 7])}, 5)
    assert fake["x"].shape == (5, 3)
    assert value_of(fake["y"]).tolist() == [4, 7, 4, 7, 4]
    assert value_of(fake["x"]) is None


def test_memory_formats_are_kept():
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert made((images, torch.arange(2)), 5)[0].is_contiguous(memory_format=torch.channels_last)
    assert made((torch.randn(2, 3, 4, 4), torch.arange(2)), 5)[0].is_contiguous()


def test_rows_are_left_out():
    fake = made((torch.randn(8, 3), torch.arange(8)), 3)
    assert fake[0].shape == (3, 3)
    assert value_of(fake[1]).tolist() == [0, 1, 2]


def test_lists_of_one_entry_a_row_follow_and_what_has_no_rows_stays():
    fake = made(
        {
            "x": torch.randn(2, 3),
            "names": ["a", "b"],
            "scale": torch.ones(()),
            "boxes": [torch.ones(1, 4), torch.ones(3, 4)],
        },
        3,
    )
    assert fake["names"] == ["a", "b", "a"]
    assert fake["scale"].shape == ()
    assert [box.shape[0] for box in fake["boxes"]] == [1, 3, 1]


def test_a_length_changes_every_dimension_of_positions():
    tokens = torch.randint(9, (2, 6))
    batch = {"tokens": tokens, "mask": torch.ones(2, 1, 6, 6, dtype=torch.bool), "positions": torch.arange(6)}
    fake = made(batch, 4, length=10)
    assert fake["tokens"].shape == (4, 10)
    assert fake["mask"].shape == (4, 1, 10, 10)
    assert fake["positions"].shape == (10,)


def test_a_length_is_refused_where_rows_have_none():
    with pytest.raises(DryRunError, match="length=4"):
        made((torch.randn(2, 3), torch.arange(2)), 2, length=4)


def test_a_dataclass_stays_one():
    @dataclass(frozen=True)
    class Batch:
        x: torch.Tensor
        name: str

    fake = made(Batch(torch.randn(2, 3), "a"), 6)
    assert isinstance(fake, Batch)
    assert fake.x.shape == (6, 3)


def test_packed_rows_can_be_left_out_and_not_repeated():
    packed = pack_sequence([torch.randn(length, 2) for length in (3, 2, 1)])
    fake = made(packed, 2)
    assert fake.data.shape == (5, 2)
    assert value_of(fake.batch_sizes).tolist() == [2, 2, 1]
    with pytest.raises(DryRunError, match=r"rows in batches of .* cannot be repeated"):
        made(packed, 4)


def test_rules_split_a_batch_of_their_own_kind():
    def split(batch, start, stop):
        sizes = batch["sizes"][start:stop]
        return {"nodes": batch["nodes"][: sum(sizes)], "sizes": sizes}

    rules = MicroBatchRules(rows=RowRules(split=split, count=lambda batch: len(batch["sizes"])))
    batch = {"nodes": torch.randn(9, 2), "sizes": [2, 3, 4]}
    assert made(batch, 2, rules=rules)["nodes"].shape == (5, 2)
    with pytest.raises(DryRunError, match="give a batch of at least 4 rows"):
        made(batch, 4, rules=rules)
