"""Detectors, whose steps assign labels to queries, split exactly."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.losses.assigned import AssignedLabels, background_of
from tests.support.modules.plain import Rows
from tests.support.runs.split_and_whole import same_cut_and_whole

QUERIES, CLASSES = 6, 3


def together(rows):
    return {"x": torch.stack([row["x"] for row in rows]), "objects": [row["objects"] for row in rows]}


class Detector(L.LightningModule):
    """Assigns the objects of each row to its first queries; all other queries are "no object"."""

    background = 0.1

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, QUERIES * 4)
        self.classes, self.places = nn.Linear(4, CLASSES + 1), nn.Linear(4, 2)
        self.register_buffer("weights", torch.tensor([1.0] * CLASSES + [self.background]))

    @staticmethod
    def loader():
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(60):
            count = int(torch.randint(1, 5, (), generator=generator))
            objects = {
                "classes": torch.randint(0, CLASSES, (count,), generator=generator),
                "places": torch.randn(count, 2, generator=generator, dtype=torch.float64),
            }
            found.append({"x": torch.randn(8, generator=generator, dtype=torch.float64), "objects": objects})
        return DataLoader(Rows(found), batch_size=13, collate_fn=together)

    def training_step(self, batch, batch_idx):
        queries = self.trunk(batch["x"]).tanh().unflatten(1, (QUERIES, 4))
        logits, places = self.classes(queries), self.places(queries)
        labels = torch.full(logits.shape[:2], CLASSES)
        for row, objects in enumerate(batch["objects"]):
            labels[row, : len(objects["classes"])] = objects["classes"]
        there = torch.cat([objects["places"] for objects in batch["objects"]])
        loss = self.of_labels(logits, labels) + 5 * (places[labels != CLASSES] - there).abs().sum() / len(there)
        self.log("loss", loss)
        return loss

    def of_labels(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), self.weights)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


class WithLighterLoss(Detector):
    background = 0.25

    def of_labels(self, logits, labels):
        return 0.3 * F.cross_entropy(logits.transpose(1, 2), labels, self.weights)


class OfFewerQueriesInSomeRows(Detector):
    """Scores fewer queries in some rows, which nothing in the batch tells."""

    def of_labels(self, logits, labels):
        is_scored = torch.arange(QUERIES) < torch.where(logits[:, 0, 0] > 0, QUERIES, QUERIES - 2)[:, None]
        return F.cross_entropy(logits[is_scored], labels[is_scored], self.weights)


@pytest.mark.parametrize("kind", [Detector, WithLighterLoss])
def test_a_detector_splits_exactly(kind):
    same_cut_and_whole(kind, size=4, max_epochs=2)


def test_another_number_of_labels_in_some_rows_is_refused():
    with pytest.raises(SplitError, match="divided by a number"):
        same_cut_and_whole(OfFewerQueriesInSomeRows, size=4, max_epochs=2)


def of_rows(*lengths):
    return {"objects": [torch.zeros(length, 2) for length in lengths]}


BATCHES = of_rows(2, 1, 4), of_rows(1, 1), of_rows(3, 2, 2)
SIZES = 3, 2, 3


def divisors(labels, *, factor=1.0):
    counts = [sum(map(len, one["objects"])) for one in BATCHES]
    return [factor * (0.9 * count + 0.1 * labels * rows) for count, rows in zip(counts, SIZES, strict=True)]


@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_divisors_tell_the_number_of_labels(factor):
    rule = AssignedLabels("objects", 1.0, 0.1).rule(divisors(100, factor=factor), BATCHES, SIZES)
    assert rule.name == "100 labels in each row, assigned to 'objects'"
    counts = [rule.count(one) for one in BATCHES]
    assert counts == pytest.approx([one / 0.9 for one in divisors(100)], rel=1e-15)


@pytest.mark.parametrize(
    "found",
    [
        [*divisors(100)[:2], None],  # one is unknown
        [*divisors(100)[:2], float("nan")],
        divisors(3),  # fewer labels than a row has objects
        divisors(10.4),  # no whole number
        [one + at for at, one in enumerate(divisors(100))],  # of other objects
        [3.0, 2.0, 3.0],  # of rows alone
    ],
)
def test_other_divisors_tell_nothing(found):
    assert AssignedLabels("objects", 1.0, 0.1).rule(found, BATCHES, SIZES) is None


def test_two_micro_batches_tell_nothing():
    assert AssignedLabels("objects", 1.0, 0.1).rule(divisors(100)[:2], BATCHES[:2], SIZES[:2]) is None


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ((1.0, 1.0, 0.1), (1.0, 0.1)),
        ((0.5, 2.0), (2.0, 0.5)),
        ((1.0, 1.0), None),
        ((1.0, 2.0, 3.0), None),
        ((1.0, 2.0, 1.0), None),
        ((1.0, 1.0, 0.0), None),
        ((), None),
    ],
)
def test_the_background_is_the_one_class_with_a_lower_weight(weights, found):
    assert background_of(weights) == found
