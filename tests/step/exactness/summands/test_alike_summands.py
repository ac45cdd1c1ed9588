"""Sums of alike means over different rows split exactly, also where micro-batches lack some."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import crossed
from tests.support.modules.plain import Rows, weights
from tests.support.modules.summed import Summed
from tests.support.runs.split_and_whole import run, same_cut_and_whole

NAN = float("nan")


def rows(seed=0, *, count=48, size=16):
    """Return batches of rows with two masks, a domain, labels of three tasks that may be missing, and figures."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        label, domain = (torch.randint(0, high, (), generator=generator) for high in (4, 3))
        tasks = torch.randint(0, 2, (3,), generator=generator).double()
        missing = torch.rand(3, generator=generator) < 0.6
        found.append(
            {
                "x": torch.randn(6, generator=generator, dtype=torch.float64),
                "label": label,
                "is_labelled": torch.rand((), generator=generator) < 0.3,
                "other": torch.rand((), generator=generator) < 0.4,
                "domain": domain,
                "tasks": tasks.masked_fill(missing, NAN),
                "codes": tasks.long().masked_fill(missing, -1),
                "target": torch.randn((), generator=generator, dtype=torch.float64),
            }
        )
    return DataLoader(Rows(found), batch_size=size)


class Alike(Summed):
    """Adds up means of one head over rows of its own, each left out where no row is there."""

    loader = staticmethod(rows)

    def __init__(self):
        super().__init__()
        self.tasks = nn.Linear(8, 3)

    def loss(self, hidden, batch):
        return hidden.sum() * 0 + sum(part for part in self.parts(hidden, batch) if part is not None)

    def squared(self, hidden, batch, known):
        return F.mse_loss(self.rows(hidden)[known, 0], batch["target"][known]) if known.any() else None


class TwoSubsets(Alike):
    def parts(self, hidden, batch):
        return [self.squared(hidden, batch, batch[name]) for name in ("is_labelled", "other")]


class LabelledOrNot(Alike):
    """Learns from labels where there are any, and from the other rows without."""

    @property
    def factor(self):
        return 0.3

    def parts(self, hidden, batch):
        known = batch["is_labelled"]
        if known.any():
            yield F.cross_entropy(self.tokens(hidden[known])[:, :4], batch["label"][known])
        if not known.all():
            yield self.factor * self.rows(hidden[~known]).square().mean()


class Domains(Alike):
    def parts(self, hidden, batch):
        for domain in range(3):
            known = batch["domain"] == domain
            if known.any():
                yield (1 + domain) * self.squared(hidden, batch, known)


class Tasks(Alike):
    """Has a mean for each column of labels, over the rows that have that label."""

    def parts(self, hidden, batch):
        logits = self.tasks(hidden)
        for task in range(3):
            known = batch["tasks"][:, task].isfinite()
            if known.any():
                yield F.binary_cross_entropy_with_logits(logits[known, task], batch["tasks"][known, task])


class Codes(Alike):
    def parts(self, hidden, batch):
        logits = self.tasks(hidden)
        for task in range(3):
            known = batch["codes"][:, task] != -1
            if known.any():
                yield F.smooth_l1_loss(logits[known, task], batch["codes"][known, task].double())


class Smoothed(Alike):
    """Smooths its labels, so that one operation computes two addends."""

    def parts(self, hidden, batch):
        yield self.smoothed(hidden, batch["label"])
        if (known := batch["is_labelled"]).any():
            yield self.smoothed(hidden[known], batch["label"][known])

    def smoothed(self, hidden, labels):
        return F.cross_entropy(self.tokens(hidden)[:, :4], labels, label_smoothing=0.1)

    def loss(self, hidden, batch):
        return sum(self.parts(hidden, batch))


class KeptInGraph(Tasks):
    """Has zeros in place of the mean of a task without labels, so that all parameters have gradients."""

    def parts(self, hidden, batch):
        logits = self.tasks(hidden)
        for task in range(3):
            known = batch["tasks"][:, task].isfinite()
            scored, labels = logits[known, task], batch["tasks"][known, task]
            yield F.binary_cross_entropy_with_logits(scored, labels) if known.any() else 0 * logits[:, task].sum()

    def loss(self, hidden, batch):
        return torch.stack([*self.parts(hidden, batch)]).sum()


class Uncertain(Tasks):
    """Weights each task by what it has learned of its uncertainty."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(3))

    def loss(self, hidden, batch):
        logits, total = self.tasks(hidden), self.scales.sum()
        for task in range(3):
            known = batch["tasks"][:, task].isfinite()
            if known.any():
                part = F.binary_cross_entropy_with_logits(logits[known, task], batch["tasks"][known, task])
                total = total + torch.exp(-self.scales[task]) * part
        return total


KINDS = [TwoSubsets, LabelledOrNot, Domains, Tasks, Codes, Smoothed, KeptInGraph, Uncertain]
FAST = [(Domains, 2, 5), (Smoothed, 0, 3), (Uncertain, 1, 3)]


@pytest.mark.parametrize(("kind", "seed", "size"), crossed(KINDS, range(4), (2, 3, 5), fast=FAST))
def test_means_over_subsets_of_rows_split_exactly(kind, seed, size):
    same_cut_and_whole(kind, size=size, loader=lambda: rows(seed), max_epochs=2)


class Confident(Alike):
    """Chooses rows by what the network says of them, which no field counts."""

    def parts(self, hidden, batch):
        chosen = hidden[:, 0] > 0
        yield F.cross_entropy(self.tokens(hidden), batch["label"])
        if chosen.any():
            yield self.squared(hidden, batch, chosen)


class Exchanging(Alike):
    """Has the domains in another order after two steps."""

    def parts(self, hidden, batch):
        order = (0, 1, 2) if self.global_step < 2 else (2, 1, 0)
        for at, domain in enumerate(order):
            known = batch["domain"] == domain
            if known.any():
                yield (1 + at) * self.squared(hidden, batch, known)


def test_means_over_rows_that_no_field_counts_are_refused():
    with pytest.raises(SplitError, match=r"cannot be split exactly|adds up other summands"):
        run(Confident, UnifiedStrategy(micro_batch_size=3), lambda: rows(0, count=96))


@pytest.mark.slow
def test_means_that_change_places_are_found_before_their_update():
    whole, *_ = run(Exchanging, "auto", lambda: rows(2, count=96))
    split, *_ = run(Exchanging, UnifiedStrategy(micro_batch_size=3), lambda: rows(2, count=96))

    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-9, atol=1e-12)


class Annealed(Alike):
    """Weighs a second loss by 0 in the first epoch."""

    def parts(self, hidden, batch):
        yield F.cross_entropy(self.tokens(hidden), batch["label"])
        if batch["is_labelled"].any():
            yield 0.5 * self.current_epoch * self.squared(hidden, batch, batch["is_labelled"])


class Fading(LabelledOrNot):
    """Learns from rows without labels in the first epoch only."""

    @property
    def factor(self):
        return 0.0 if self.current_epoch else 0.3


@pytest.mark.parametrize("kind", [Annealed, Fading])
def test_a_summand_may_have_the_factor_0_for_some_time(kind):
    same_cut_and_whole(kind, size=7, loader=lambda: rows(3), max_epochs=2)
