"""A batch is checked before its update where its step first decides otherwise by values of its rows."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.facts.bends import are_mixed
from lightning_unified.step.exactness.facts.decisions import BatchDecisions, Decisions
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run


class Prepared(Net):
    """Prepares its inputs by a figure of the batch; that of batch 9 is large."""

    def training_step(self, batch, batch_idx):
        x, size = batch["x"].clamp(-3, 3), batch["size"]
        return F.cross_entropy(self.net(self.prepare(x, size)), batch["y"])


class ByTensor(Prepared):
    def prepare(self, x, size):
        return x - x.mean(0) if size.mean() > 0.6 else x


class ByNumber(Prepared):
    def prepare(self, x, size):
        return x - x.mean(0) if size.mean().item() > 0.6 else x


class ByWhere(Prepared):
    def prepare(self, x, size):
        return torch.where(size.mean() > 0.6, x - x.mean(0), x)


class ByClamp(Prepared):
    def prepare(self, x, size):
        return x / size.max().clamp(min=0.75)


class ByFactor(Prepared):
    def prepare(self, x, size):
        return x * min(1.0, 0.75 / float(size.max()))


class ByStep(Prepared):
    def prepare(self, x, size):
        return x * (1 + size.max().mul(1.2).floor())


class ByComputedLimit(Prepared):
    def prepare(self, x, size):
        return x * size.clamp(max=size.median() * 3)[:, None]


class ByCount(Prepared):
    """All rows of batch 9 reach the limit together, and no micro-batch does."""

    def prepare(self, x, size):
        return x - x.mean(0) if (size > 0.6).sum() > 4 else x


class ByList(Prepared):
    def prepare(self, x, size):
        return x - x.mean(0) if max(size.tolist()) > 0.75 else x


class Block(nn.Module):
    def forward(self, x, size):
        return x - x.mean(0) if len(size[size > 0.6]) else x


class InBlock(Prepared):
    def __init__(self):
        super().__init__()
        self.prepare = Block()


def loader(*, large=0.9, rows=range(1, 8)):
    sizes = torch.rand(13 * 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10 + 0.4
    sizes[[9 * 8 + row for row in rows]] = large - torch.arange(len(rows)).double() / 1e6  # equal ones would be a fact
    return batches(number=13, size=8, change=lambda batch, row: {"size": sizes[8 * batch + row]})


@first_cells(
    4, "kind", [ByNumber, ByFactor, ByCount, ByStep, ByTensor, ByWhere, ByClamp, ByComputedLimit, ByList, InBlock]
)
def test_a_new_decision_about_inputs_is_refused_before_its_update(kind, checks):
    of_largest = (ByClamp, ByFactor, ByStep, ByComputedLimit)  # which most micro-batches would have too
    data = loader(large=2.0, rows=[6]) if kind in of_largest else loader()

    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly"):
        run(kind, data)

    assert checks.steps[-1] == 9


class OfAllRows(Prepared):
    """Compares the number of large rows with a limit that no micro-batch reaches, and all rows of batch 9 do."""

    def __init__(self):
        super().__init__()
        self.limit = 5

    def prepare(self, x, size):
        return x - x.mean(0) if self.number(size > 0.6) >= self.limit else x


def with_more_large_rows(usual, ninth):
    """Return a loader whose batch 9 has more large rows than the others, and none that is larger."""
    sizes = torch.rand(13, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10 + 0.4
    for batch in range(13):
        places = [(batch + row) % 8 for row in usual] if batch != 9 else ninth
        sizes[batch, places] = 0.9 - torch.arange(len(places)).double() / 1e6
    return batches(number=13, size=8, change=lambda batch, row: {"size": sizes[batch, row]})


class ByItem(OfAllRows):
    def number(self, large):
        return large.sum().item()


class ByLength(OfAllRows):
    def prepare(self, x, size):
        large = (size > 0.6).nonzero()
        return x - x.mean(0) if len(large) > 4 else x


class ByHinge(OfAllRows):
    def prepare(self, x, size):
        return x * (1 + F.relu((size > 0.6).sum() - 4))


@first_cells(1, "kind", [ByLength, ByItem, ByHinge])
def test_a_limit_that_only_all_rows_reach_is_refused_before_its_update(kind, checks):
    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly"):
        run(kind, with_more_large_rows([0, 3], [0, 2, 4, 5, 7]))

    assert checks.steps[-1] == 9


@first_cells(2, "kind", [ByNumber, ByCount, ByFactor, ByTensor, ByStep])
def test_the_same_decision_in_all_batches_costs_no_check(kind, checks):
    module, _ = run(kind, loader(large=0.5))
    plain, _ = run(kind, loader(large=0.5), strategy="auto")

    assert checks.steps == [0, 1, 3, 7]
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-14)


class Sound(Prepared):
    """Decides about each row alone."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        large = batch["size"] > 0.6
        if large.any():
            losses = torch.where(large, 2 * losses, losses)
        return losses.mean()


def test_a_decision_that_is_sound_trains_as_the_whole_batch(checks):
    module, _ = run(Sound, loader())
    plain, _ = run(Sound, loader(), strategy="auto")

    assert checks.steps == [0, 1, 3, 7, 9]
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-14)


class Alternates(Prepared):
    """Runs one of two places of its code, by turns."""

    def prepare(self, x, size):
        self.seen = size.max().item()
        if self.trainer.fit_loop.epoch_loop.batch_progress.total.ready % 2:
            return x.mul(2)
        return x.add(x)


def test_places_that_take_turns_are_checked_once_each(checks):
    run(Alternates, batches(number=20, change=lambda batch, row: {"size": torch.tensor(0.5).double()}))

    assert checks.steps == [0, 1, 3, 7, 15]


def test_only_a_step_that_reads_values_is_watched():
    decisions, batch = Decisions(L.LightningModule()), BatchDecisions(Decisions(L.LightningModule()))
    decisions.watched(lambda: F.relu(torch.ones(99)).sum() * 2)()
    assert not decisions.are_noted
    decisions.watched(lambda: torch.ones(99).sum().item())()
    assert decisions.are_noted

    assert batch.run(0, lambda: 5) == 5
    assert not batch.facts([(3.0, 3.0)])


def facts_of(*steps):
    decisions = Decisions(L.LightningModule())
    decisions.watched(lambda: bool(torch.ones(())))()
    batch = BatchDecisions(decisions)
    for index, step in enumerate(steps):
        batch.run(index, step)
    return batch.facts([(3.0, 3.0) for _ in steps])


def test_micro_batches_on_both_sides_of_a_limit_differ():
    def step(value):
        figure = torch.tensor(value)
        return lambda: figure > 0.5

    assert not are_mixed(facts_of(step(0.1), step(0.0)))
    assert are_mixed(facts_of(step(0.1), step(0.9)))
    assert are_mixed(facts_of(step(0.3), step(0.4)))  # together they lie beyond


def test_values_inside_a_vmap_are_not_kept():
    def step():
        return torch.vmap(lambda one: one.clamp(max=0.5))(torch.ones(3))

    assert not any("clamp" in name for name, *_ in facts_of(step))


class Compiled(Prepared):
    """Calls a compiled function, which may have no break of its graph."""

    half = staticmethod(torch.compile(lambda x: (x / 2).clamp(max=1.0), backend="eager", fullgraph=True))

    def prepare(self, x, size):
        self.seen = size.max().item()
        return self.half(x)


@pytest.mark.slow
def test_a_compiled_function_of_a_watched_step_compiles():
    module, _ = run(Compiled, loader(), strategy=UnifiedStrategy(micro_batch_size=4))
    plain, _ = run(Compiled, loader(), strategy="auto")

    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-14)


class LogsByCounter(Net):
    """Logs a mean, and in batch 9 its square: no check sees batch 9 otherwise."""

    seen = 0

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net(batch["x"]), batch)
        self.seen += 1
        self.log("figure", loss**2 if self.seen == 10 else loss)
        return loss


def test_a_log_that_first_bends_by_a_counter_is_checked_and_named(checks, caplog):
    run(LogsByCounter, batches(number=13))

    assert checks.steps[-1] == 9
    assert any("'figure'" in record.message for record in caplog.records)


class LimitsGradient(Prepared):
    """Limits a gradient in its own backward, in batch 9."""

    def prepare(self, x, size):
        self.sizes = [size]
        return x

    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)
        if self.sizes[0].mean() > 0.7:
            self.net[0].weight.grad.clamp_(-0.001, 0.001)


def test_a_decision_of_the_modules_own_backward_is_refused_before_its_update(checks):
    with pytest.raises(SplitError, match="LimitsGradient cannot be split exactly"):
        run(LimitsGradient, with_more_large_rows([0], [0, 1, 3, 4, 5, 7]))

    assert checks.steps[-1] == 9


def test_operands_of_other_kinds_are_left_alone():
    def step():
        x = torch.arange(6.0).view(3, 2)
        torch.clamp(input=x, min=0)
        F.relu(x.to_sparse().to_dense())
        (x.max(0), x.to(torch.complex64)[0, 0].item(), x.to("meta") > 1)
        (torch.nested.nested_tensor([x, x[:1]]) * 2.0, x.to(torch.float8_e5m2).to(x) > x.mean(), torch.equal(x, x))
        (x == None, x.eq(10**18), x.mean() < float("inf"), x.sum().sub(1), x.sum() > True)  # noqa: E711
        exec(compile("bool(x.any())", "<string>", "eval"), {"x": x, "__name__": None})
        return x.sum().item()

    assert facts_of(step)
