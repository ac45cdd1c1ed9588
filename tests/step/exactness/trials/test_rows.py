"""Which rows are checked, and in which parts."""

import pytest
import torch

from lightning_unified.step.exactness.rows import splits_of, starts_of, window, windows_over


@pytest.mark.parametrize("units", range(2, 41))
def test_every_split_has_all_units_and_no_empty_micro_batch(units):
    for split in splits_of(units):
        assert sum(split) == units
        assert min(split) >= 1


@pytest.mark.parametrize("units", range(6, 41))
def test_from_six_units_on_three_unequal_micro_batches(units):
    for split in splits_of(units):
        assert len(set(split)) == len(split) == 3


@pytest.mark.parametrize("units", range(4, 41))
def test_two_different_splits_of_three_micro_batches(units):
    first, second = splits_of(units)

    assert len(first) == len(second) == 3
    assert first != second


@pytest.mark.parametrize("units", range(7, 41))
def test_micro_batches_of_two_units_or_more_if_asked(units):
    first, second = splits_of(units, least=2)

    assert sum(first) == sum(second) == units
    assert min(*first, *second) >= 2
    assert len(first) == len(second) == 3
    assert first != second
    assert min(len(set(first)), len(set(second))) > 1


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("units", range(7, 41))
def test_no_split_has_whole_pairs_only(units, least):
    has_odd_starts = [any(start % 2 for start in starts_of(split)) for split in splits_of(units, least=least)]

    assert all(has_odd_starts) if units > 8 else any(has_odd_starts)


@pytest.mark.parametrize(
    ("units", "splits"),
    [(0, []), (1, []), (2, [[1, 1]]), (3, [[1, 1, 1], [1, 2]]), (4, splits_of(4)), (5, splits_of(5))],
)
def test_few_units(units, splits):
    assert splits_of(units) == splits_of(units, least=2) == splits


def test_micro_batches_begin_where_the_one_before_ends():
    assert starts_of([1, 3, 4]) == [0, 1, 4]
    assert starts_of([]) == []


def columns(rows=32, **special):
    """Return a batch whose rows are alike, but for `special` entries by row."""
    x, y = torch.ones(rows, 4), torch.ones(rows, dtype=torch.long)
    for row, value in special.get("x", {}).items():
        x[row] = value
    for row, value in special.get("y", {}).items():
        y[row] = value
    return {"x": x, "y": y}


RARE = {
    "a rare label": {"y": {21: 3}},
    "an ignored label": {"y": {21: -100}},
    "a row without observations": {"x": {21: torch.zeros(4)}},
    "a padded row": {"x": {21: torch.tensor([1.0, 1.0, 0.0, 0.0])}},
    "a missing value": {"x": {21: torch.tensor([1.0, 1.0, 1.0, float("nan")])}},
    "an outlier": {"x": {21: torch.tensor([1.0, 1.0, 1.0, 50.0])}},
    "a negative number": {"x": {21: torch.tensor([1.0, 1.0, 1.0, -1.0])}},
}


@pytest.mark.parametrize("name", RARE)
def test_the_window_takes_in_the_rare_row(name):
    start = window(columns(**RARE[name]), rows=32, size=8, unit=1)

    assert start <= 21 < start + 8


@pytest.mark.parametrize("name", RARE)
def test_the_window_keeps_units_together(name):
    start = window(columns(**RARE[name]), rows=32, size=8, unit=4)

    assert start % 4 == 0
    assert start <= 21 < start + 8


def test_the_window_takes_in_rows_of_several_kinds():
    batch = columns(y=dict.fromkeys(range(12), 2))

    start = window(batch, rows=32, size=4, unit=1)

    assert len(batch["y"][start : start + 4].unique()) == 2


def test_the_window_ends_with_the_batch():
    start = window(columns(rows=500, y={499: 7}), rows=500, size=8, unit=1)

    assert start == 492


@pytest.mark.parametrize("batch", [{"text": ["a"] * 32}, {"x": torch.ones(3, 4)}, {"x": torch.ones(32, 0)}])
def test_batches_without_tensors_of_rows_are_looked_at_from_the_first(batch):
    assert window(batch, rows=32, size=8, unit=1) == 0


@pytest.mark.parametrize(("wanted", "size", "starts"), [
    (range(24, 48), 24, [24]),
    (range(24, 48), 8, [24, 32, 40]),
    (range(24, 48), 10, [24, 34, 38]),
    (range(48, 64), 24, [40]),
    (range(8), 24, [0]),
])  # fmt: skip
def test_windows_hold_all_wanted_rows(wanted, size, starts):
    assert windows_over(wanted, rows=64, size=size) == starts


def test_complex_sparse_and_whole_number_tensors_are_looked_at_too():
    batch = {
        "z": torch.ones(32, 2, dtype=torch.complex64),
        "s": torch.eye(32).to_sparse(),
        "image": torch.zeros(32, 3, dtype=torch.uint8),
        "mask": torch.arange(32)[:, None] != torch.tensor([30]),
    }

    assert window(batch, rows=32, size=8, unit=1) == 23
