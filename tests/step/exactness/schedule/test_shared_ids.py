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


class OfEachRow(Net):
    def loss(self, out, batch):
        return F.cross_entropy(out + batch["id"][:, None] % 2, batch["y"])


def test_ids_that_rows_seldom_share_cost_one_check(checks):
    def row(batch, place):
        return {"id": 33_000 + 100 * (8 * batch + place - (batch % 3 == 2 and place == 7))}

    run(OfEachRow, batches(number=20, change=row))

    assert checks.steps == [0, 1, 2, 3, 7, 15]


def test_only_rows_of_few_entries_share_values():
    def shared(*rows):
        return any(kind == SHARED for _, kind, _ in facts_of({"id": torch.tensor(rows)}, len(rows)))

    assert shared(7, 8, 7)
    assert shared([1, 900], [2, 900], [3, 901])
    assert not shared(7, 8, 9)
    assert not shared([1, 2], [2, 1], [3, 3])
    assert not shared([1] * 5, [2] * 5, [1] * 5)
