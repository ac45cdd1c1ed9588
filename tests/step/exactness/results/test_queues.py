"""A queue of the latest rows holds those of all micro-batches, in the order of the whole batch."""

from collections import deque

import pytest
import torch
from torch.nn.functional import normalize

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.writing import Writes
from tests.support.runs.schedules import batches, run

SIZE = 50


class Queue(Writes):
    """Compares its rows with those of the batches before, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(SIZE, 4))

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        loss = (out @ self.rows().T).logsumexp(1).mean() + (out - 1).square().mean()
        self.add(normalize(out.detach(), dim=1))
        return loss

    def rows(self):
        return self.queue.clone()

    def add(self, keys):
        self.queue = torch.cat([self.queue, keys])[-SIZE:]


class First(Queue):
    def add(self, keys):
        self.queue = torch.cat([keys, self.queue])[:SIZE]


class InPlace(Queue):
    def add(self, keys):
        self.queue[len(keys) :] = self.queue[: -len(keys)].clone()
        self.queue[: len(keys)] = keys


class Columns(Queue):
    def __init__(self):
        super().__init__()
        self.queue = torch.zeros(4, SIZE)

    def rows(self):
        return self.queue.T

    def add(self, keys):
        self.queue = torch.cat([self.queue, keys.T], 1)[:, -SIZE:]


class Short(Queue):
    """Holds fewer rows than a batch has, and more than a micro-batch."""

    def __init__(self):
        super().__init__()
        self.queue = torch.zeros(30, 4)

    def add(self, keys):
        self.queue = torch.cat([self.queue, keys.relu()])[-30:]


class Views(Queue):
    def add(self, keys):
        views = torch.stack([keys, keys / 2], 1)
        self.queue = torch.cat([self.queue, views.flatten(0, 1).flip(0)])[-SIZE:]


class InDeque(Queue):
    def __init__(self):
        super().__init__()
        self.latest = deque([torch.zeros(4).double()], maxlen=SIZE)

    def rows(self):
        return torch.stack(list(self.latest))

    def add(self, keys):
        self.latest.extend(keys.unbind())


class InDequeFromTheLeft(InDeque):
    def add(self, keys):
        self.latest.extendleft(keys.unbind())


class ReadAfterwards(Queue):
    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        self.add(normalize(out.detach(), dim=1))
        return (out @ self.rows().T).logsumexp(1).mean()


class Positive(Queue):
    def add(self, keys):
        super().add(keys[keys[:, 0] > 0])


class Half(Queue):
    def add(self, keys):
        super().add(keys[: len(keys) // 2])


class FewRows(Queue):
    def add(self, keys):
        super().add(keys[:34])


class Centered(Queue):
    def add(self, keys):
        super().add(keys - keys.mean(0))


class Decayed(Queue):
    def add(self, keys):
        self.queue = torch.cat([0.9 * self.queue - 1, keys])[-SIZE:]


class Highest(Queue):
    def add(self, keys):
        self.queue = torch.cat([self.queue, keys]).sort(0).values[-SIZE:]


class Turned(Queue):
    """Adds at the other end from the fifth batch on, before which no check is due."""

    def __init__(self):
        super().__init__()
        self.done = [[]]

    def add(self, keys):
        (Queue if len(self.done[0]) < 4 else First).add(self, keys)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.done[0].append(batch_idx)


def loader():
    return batches(number=6, size=40)


SOUND = [Queue, First, InPlace, Columns, Short, Views, InDeque, InDequeFromTheLeft]


@first_cells(3, "kind", SOUND)
def test_a_queue_holds_the_rows_of_all_micro_batches(kind):
    whole, _ = run(kind, loader(), strategy="auto")
    split, _ = run(kind, loader(), strategy=UnifiedStrategy(micro_batch_size=18))

    torch.testing.assert_close(split.rows(), whole.rows(), rtol=0, atol=1e-10)
    torch.testing.assert_close(weights(split), weights(whole), rtol=0, atol=1e-10)


@first_cells(3, "kind", [ReadAfterwards, Positive, Half, FewRows, Centered, Decayed, Highest, Turned])
def test_what_is_no_queue_of_the_rows_is_refused(kind):
    with pytest.raises(SplitError):
        run(kind, loader(), strategy=UnifiedStrategy(micro_batch_size=18))
