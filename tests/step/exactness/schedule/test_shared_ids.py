"""A batch in which rows first share an id is checked before its update."""

import pytest
import torch
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.facts.profile import SHARED, facts_of
from tests.support.lanes import first_cells
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run


class LossOfEachId(Net):
    """Adds up the rows of one id before it computes their loss."""

    def loss(self, out, batch):
        ids, places = batch["id"].unique(return_inverse=True)
        return torch.zeros(len(ids), 4).to(out).index_add(0, places, out).square().sum() / len(out)


class PairsOfOneId(Net):
    def loss(self, out, batch):
        return (out @ out.T)[batch["id"][:, None] == batch["id"][None]].sum() / len(out)


class NamedRows(LossOfEachId):
    def loss(self, out, batch):
        names = {name: place for place, name in enumerate(batch["name"])}
        return super().loss(out, {"id": torch.tensor([names[name] for name in batch["name"]])})


@first_cells(1, "kind", [LossOfEachId, PairsOfOneId, NamedRows])
def test_the_first_rows_with_one_id_are_compared_however_far_apart_they_are(kind, checks):
    def row(batch, place):
        number = 1000 + (40 * batch + (0 if (batch, place) == (5, 39) else place))
        return {"name": f"row {number}"} if kind is NamedRows else {"id": number}

    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly"):
        run(kind, batches(number=7, size=40, change=row), strategy=UnifiedStrategy(micro_batch_size=18))

    assert checks.steps[-1] == 5


class PairsOfEqualRows(Net):
    def loss(self, out, batch):
        keys = batch["key"].reshape(len(out), -1)
        are_equal = (keys[:, None] == keys[None]).all(-1) & (keys >= 0).any(-1)
        return (out @ out.T)[are_equal].sum() / len(out)


KEYS = {
    "times": lambda number: number + 0.5,
    "features": lambda number: torch.sin(number * torch.arange(1.0, 7.0)).abs(),
    "tokens": lambda number: torch.arange(number, number + 6),
    "ids beside rows without one": lambda number: -1 if number % 9 == 0 else number,
}


@first_cells(1, "kind", list(KEYS))
def test_the_first_equal_rows_are_compared_however_far_apart_they_are(kind, checks):
    def row(batch, place):
        number = 1000 + 40 * batch + (3 if (batch, place) == (5, 38) else place)
        return {"key": torch.as_tensor(KEYS[kind](number))}

    with pytest.raises(SplitError, match="PairsOfEqualRows cannot be split exactly"):
        run(PairsOfEqualRows, batches(number=7, size=40, change=row), strategy=UnifiedStrategy(micro_batch_size=18))

    assert checks.steps[-1] == 5


class OfEachRow(Net):
    def loss(self, out, batch):
        return F.cross_entropy(out + batch["id"][:, None] % 2, batch["y"])


def test_ids_that_rows_seldom_share_cost_one_check(checks):
    def row(batch, place):
        return {"id": 33_000 + 100 * (8 * batch + place - (batch % 3 == 2 and place == 7))}

    run(OfEachRow, batches(number=20, change=row))

    assert checks.steps == [0, 1, 2, 3, 7, 15]


def shared(rows, dtype=torch.int64):
    return sum(kind == SHARED for _, kind, _ in facts_of({"id": torch.tensor(rows).to(dtype)}, len(rows)))


FORMATS = [torch.int64, torch.uint8, torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_of_few_entries_share_values_and_others_all_entries(dtype):
    assert shared([7, 8, 7], dtype)
    assert shared([[1, 9], [2, 9], [3, 8]], dtype)
    assert not shared([7, 8, 9], dtype)
    assert not shared([[1, 2], [2, 1], [3, 3]], dtype)
    assert shared([[1] * 5, [2] * 5, [1] * 5], dtype)
    assert not shared([[1] * 5, [2] * 5, [1, 1, 1, 1, 3]], dtype)


def test_more_shared_values_are_a_fact_in_powers_of_two():
    assert [shared([*range(9), *range(number)]) for number in range(5)] == [0, 1, 2, 2, 3]
    assert shared([-1] * 9 + [5, 6]) == 1


@pytest.mark.parametrize("at_once", [1, 7, 1 << 22])
def test_equal_rows_are_found_in_parts(monkeypatch, at_once):
    rows = torch.randn(9, 3, 5, generator=torch.Generator().manual_seed(0))
    rows[7] = rows[2]
    monkeypatch.setattr("lightning_unified.step.exactness.facts.alike._AT_ONCE", at_once)

    assert [fact for fact in facts_of({"x": rows}, 9) if fact[1] == SHARED] == [("x", SHARED, 1)]
