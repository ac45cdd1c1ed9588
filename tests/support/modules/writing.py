"""Modules that write state in their steps: per micro-batch, or once per batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.modules.plain import Rows
from tests.support.modules.split import Net


class Writes(Net):
    """Each subclass writes something in its step."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        loss = F.cross_entropy(out, batch["y"])
        with torch.no_grad():
            self.write(batch, out, loss)
        return loss

    def write(self, batch, out, loss):
        raise NotImplementedError


class Counter(Writes):
    calls = 0

    def write(self, batch, out, loss):
        self.calls += 1


class SeenRows(Writes):
    rows = 0

    def write(self, batch, out, loss):
        self.rows += len(out)


class RunningLoss(Writes):
    average = 0.0

    def write(self, batch, out, loss):
        self.average = 0.9 * self.average + 0.1 * float(loss)


class RunningMean(Writes):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def write(self, batch, out, loss):
        self.mean.mul_(0.9).add_(0.1 * out.mean(0))


class AddedUp(Writes):
    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(4))

    def write(self, batch, out, loss):
        self.counts += torch.bincount(batch["y"], minlength=4)


class Largest(Writes):
    largest = -1e9

    def write(self, batch, out, loss):
        self.largest = max(self.largest, float(out.max()))


class Smallest(Writes):
    smallest = float("inf")

    def write(self, batch, out, loss):
        self.smallest = min(self.smallest, float(out.max()))


class LastTotal(Writes):
    """Writes the total of the last batch.

    In the first batch a growing sum would give the same value, because it starts at zero.
    """

    total = 0.0

    def write(self, batch, out, loss):
        self.total = float(out.sum())


class RareTotal(Writes):
    """Writes the number of large rows of the last batch, of which the first four batches have none."""

    total = 0.0

    @staticmethod
    def loader():
        parts = [Writes.loader(seed) for seed in range(3)]
        rows = [row for part in parts for row in part.dataset]
        for index, row in enumerate(rows):
            row["x"][0] = 0.5 if index < 4 * parts[0].batch_size else 6.0
        return DataLoader(Rows(rows), batch_size=parts[0].batch_size)

    def write(self, batch, out, loss):
        self.total = float((batch["x"][:, 0] > 5).sum())


class RareSum(RareTotal):
    """Adds the number of large rows up."""

    def write(self, batch, out, loss):
        self.total += float((batch["x"][:, 0] > 5).sum())


class LossOfEachSample(Writes):
    """Writes a table by sample.

    It starts with zeros, where sums and maxima would equal the written values.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("losses", torch.zeros(24))

    def write(self, batch, out, loss):
        self.losses[batch["sample"]] = F.cross_entropy(out, batch["y"], reduction="none")

    @staticmethod
    def loader(seed=0, dtype=torch.float64):
        """Return five batches, so that an epoch's first ones are not due to be checked."""
        rows = [{**row, "sample": sample} for sample, row in enumerate(Net.loader(seed, dtype).dataset)]
        return DataLoader(Rows(rows), batch_size=5)


class Teacher(Writes):
    """A momentum teacher moves towards the weights, once a batch."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(6, 16).requires_grad_(False)

    def write(self, batch, out, loss):
        for mine, other in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
            mine.lerp_(other, 0.1)


class DataWrite(Teacher):
    """Writes `.data`, which does not change a version counter."""

    def write(self, batch, out, loss):
        self.teacher.weight.data.mul_(0.9)


class LargeTeacher(Teacher):
    """Holds more bytes of parameters than the strategy copies before every step."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(256, 256).requires_grad_(False)

    def write(self, batch, out, loss):
        for parameter in self.large.parameters():
            parameter.data.mul_(0.9).add_(0.1 * self.net[0].weight.mean())


class LargeList(Writes):
    def __init__(self):
        super().__init__()
        self.large = [torch.ones(256, 256, dtype=torch.float64)]

    def write(self, batch, out, loss):
        self.large[0].mul_(0.9)


class LargeBuffer(Writes):
    def __init__(self):
        super().__init__()
        self.register_buffer("huge", torch.zeros(1 << 21))

    def write(self, batch, out, loss):
        self.huge += 1


class Outputs(Writes):
    def __init__(self):
        super().__init__()
        self.outs = []

    def write(self, batch, out, loss):
        self.outs.append(float(loss))


class OutputsByRow(Outputs):
    def write(self, batch, out, loss):
        self.outs.append({"out": out.clone(), "rows": len(out), "loss": loss})


class Pending(Writes):
    """Keeps the features of the last batch."""

    last = None

    def write(self, batch, out, loss):
        self.last = out.clone()


class Kept(Writes):
    """Keeps values by name in a dict."""

    def __init__(self):
        super().__init__()
        self.kept = {"steps": 0, "best": [1e9]}

    def write(self, batch, out, loss):
        self.kept["steps"] += 1
        self.kept["best"][0] = min(self.kept["best"][0], 5.0 - self.kept["steps"])


class Spectral(Writes):
    def make_middle(self):
        return nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))

    def write(self, batch, out, loss):
        pass


class InstanceNorm(Writes):
    def make_middle(self):
        return nn.Sequential(
            nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True, affine=True), nn.Flatten()
        )

    def write(self, batch, out, loss):
        pass


class Sparse(Writes):
    """Replaces a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(3).to_sparse())

    def write(self, batch, out, loss):
        self.edges = (0.9 * self.edges).coalesce()


class Nothing(Writes):
    """Writes an attribute and restores it."""

    depth = 0

    def write(self, batch, out, loss):
        self.depth += 1
        self.depth -= 1
