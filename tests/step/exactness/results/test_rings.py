"""A ring of the latest rows holds those of all micro-batches, also at its end."""

import pytest
import torch
from torch.nn.functional import normalize

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.state.rings import learn_rings, wholes_of_ring
from lightning_unified.step.results.state.writes import Write
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.writing import Writes
from tests.support.runs.schedules import batches, run

SIZE = 100  # batches of 40 rows do not end at the end


class Ring(Writes):
    """Compares its rows with those of the batches before, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ring", torch.zeros(SIZE, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.rows = self.kept = 0
        self.is_full = False

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        loss = (out @ self.ring.clone().T).logsumexp(1).mean() + (out - 1).square().mean()
        self.add(normalize(out.detach(), dim=1))
        return loss

    def add(self, keys):
        self.ring[(self.place + torch.arange(len(keys))) % SIZE] = keys
        self.place[0] = (self.place[0] + len(keys)) % SIZE


class Counting(Ring):
    def add(self, keys):
        self.ring[(self.rows + torch.arange(len(keys))) % SIZE] = keys
        self.rows += len(keys)


class Cut(Ring):
    """Leaves out what is beyond the end, as lightly's memory bank does."""

    def add(self, keys):
        place, stop = int(self.place), int(self.place) + len(keys)
        self.ring[place:stop] = keys[: SIZE - place]
        self.place[0] = stop if stop < SIZE else 0


class Failing(Ring):
    """Has no room for other numbers of rows, as MoCo's queue."""

    def __init__(self):
        super().__init__()
        self.ring = torch.randn(80, 4)

    def add(self, keys):
        self.ring[int(self.place) : int(self.place) + len(keys)] = keys
        self.place = (self.place + len(keys)) % 80


class WithLabels(Ring):
    """Keeps a label of each row, which may be there already."""

    def __init__(self):
        super().__init__()
        self.labels = torch.zeros(SIZE, dtype=torch.long)

    def add(self, keys):
        self.labels[(self.place + torch.arange(len(keys))) % SIZE] = keys.argmax(1)
        self.rows += len(keys)
        super().add(keys)


class Flagging(Ring):
    def add(self, keys):
        self.is_full = self.is_full or int(self.place) + len(keys) >= SIZE
        super().add(keys)


class Limiting(Ring):
    def add(self, keys):
        self.kept = min(self.kept + len(keys), SIZE)
        super().add(keys)


class Shorter(Ring):
    """Begins anew before the end."""

    def add(self, keys):
        self.ring[(self.place + torch.arange(len(keys))) % 90] = keys
        self.place[0] = (self.place[0] + len(keys)) % 90


class StepsBack(Ring):
    def add(self, keys):
        place = min(int(self.place), SIZE - len(keys))
        self.ring[place : place + len(keys)] = keys
        self.place[0] = (place + len(keys)) % SIZE


def loader():
    return batches(number=6, size=40)


@first_cells(3, "kind", [Ring, Cut, WithLabels, Counting, Failing])
def test_a_ring_holds_the_rows_of_all_micro_batches(kind):
    whole, _ = run(kind, loader(), strategy="auto")
    split, _ = run(kind, loader(), strategy=UnifiedStrategy(micro_batch_size=18))

    torch.testing.assert_close(split.ring, whole.ring, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights(split), weights(whole), rtol=0, atol=1e-10)
    assert (int(split.place), split.rows) == (int(whole.place), whole.rows)


@first_cells(2, "kind", [Flagging, Limiting, Shorter, StepsBack])
def test_a_step_that_does_anything_else_at_the_end_is_refused(kind):
    with pytest.raises(SplitError, match=rf"{kind.__name__} writes"):
        run(kind, loader(), strategy=UnifiedStrategy(micro_batch_size=18))


def test_the_end_of_a_ring_is_not_guessed():
    def writes(place, rows):
        ring = torch.arange(10.0)
        ring[place : place + rows] = 50 + torch.arange(float(rows))
        return {"ring": Write("tensor", torch.arange(10.0), ring), "place": Write("entry", place, place + rows)}

    table, half = MergeTable(), {"ring": writes(0, 1)["ring"], "place": Write("entry", 0, 1)}
    whole = {
        "ring": Write("tensor", torch.arange(10.0), torch.tensor([50.0, 50, *range(2, 10)])),
        "place": Write("entry", 0, 2),
    }

    assert learn_rings(table, ["ring"], whole, [half, half], [1, 1], tolerance=0.0) == {"ring", "place"}
    assert list(wholes_of_ring(table, "place", [writes(4, 2)] * 2, [2, 2])) == [8] * 4
    assert list(wholes_of_ring(table, "place", [writes(4, 3)] * 2, [3, 3])) == [None] * 4
