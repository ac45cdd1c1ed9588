"""A step writes into its module once a batch, as if the batch had run whole.

Otherwise the split is refused, with the path.
"""

import itertools
import random
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable, MicroBatchWeights
from lightning_unified.step.results.state.entries import is_mergeable, learn_entry
from tests.support.lanes import crossed, first_cells, slow
from tests.support.modules.plain import fit, weights
from tests.support.modules.writing import (
    AddedUp,
    Counter,
    DataWrite,
    InstanceNorm,
    Kept,
    LargeBuffer,
    LargeList,
    Largest,
    LargeTeacher,
    LastTotal,
    LossOfEachSample,
    Nothing,
    Outputs,
    OutputsByRow,
    Pending,
    RareSum,
    RareTotal,
    RunningLoss,
    RunningMean,
    SeenRows,
    Smallest,
    Sparse,
    Spectral,
    Teacher,
    Writes,
)

SAME = [
    Counter,
    SeenRows,
    RunningLoss,
    RunningMean,
    AddedUp,
    Largest,
    Smallest,
    LastTotal,
    RareTotal,
    RareSum,
    LossOfEachSample,
    Teacher,
    DataWrite,
    LargeTeacher,
    LargeList,
    LargeBuffer,
    Outputs,
    OutputsByRow,
    Pending,
    Kept,
    Spectral,
    InstanceNorm,
    Sparse,
    Nothing,
]


class Normed(Writes):
    """The root of a mean square: no rule puts it together."""

    size = 1.0

    def write(self, batch, out, loss):
        self.size = 0.9 * self.size + 0.1 * float(out.norm())


class Queue(Writes):
    """Writes features into a queue at a place that moves with each batch's rows, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.arange(256.0).view(64, 4))
        self.place = 0

    def write(self, batch, out, loss):
        self.queue[self.place : self.place + len(out)] = out
        self.place = (self.place + len(out)) % 32


class Covariance(RunningMean):
    def write(self, batch, out, loss):
        self.mean.copy_(out.std(0))


class History(Outputs):
    def write(self, batch, out, loss):
        self.outs.append(float(out.std()))


class ClipsAfterwards(Writes):
    def write(self, batch, out, loss):
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class ZeroesAtTimes(Writes):
    def write(self, batch, out, loss):
        if self.trainer.global_step % 2:
            self.net[-1].bias.zero_()


class FreezesAfterwards(Writes):
    def write(self, batch, out, loss):
        self.net[0].requires_grad_(self.trainer.global_step % 2 == 1)


class WritesInHook(Writes):
    """Updates a weight when its gradient is complete, past autograd's version counter."""

    def __init__(self):
        super().__init__()
        self.net[0].weight.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter):
        parameter.data.sub_(0.1 * parameter.grad)

    def write(self, batch, out, loss):
        pass


class NormalizesBefore(Writes):
    """Writes a weight before it is used, and the same again the second time."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            weight = self.net[0].weight
            weight.copy_(torch.nn.functional.normalize(weight, dim=1))
        return super().training_step(batch, batch_idx)

    def write(self, batch, out, loss):
        pass


@pytest.mark.parametrize("kind", [ClipsAfterwards, ZeroesAtTimes, FreezesAfterwards, WritesInHook])
def test_parameters_that_are_written_after_their_use_are_refused(kind):
    with pytest.raises(SplitError, match=r"net\.\d\.\w+ in its step, after its forward pass has used it"):
        run(kind, UnifiedStrategy(micro_batch_size=3))


class ComparesRows(Writes):
    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        return torch.nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))


@pytest.mark.parametrize("kind", [ClipsAfterwards, WritesInHook, ComparesRows])
def test_a_batch_whose_check_has_written_weights_does_not_go_on_whole(kind):
    strategy = UnifiedStrategy(micro_batch_size=3)
    with pytest.raises(SplitError) as refused:
        run(kind, strategy)
    sizing = strategy.policy.sizing
    sizing.before_overrun = {**sizing.training.state_dict(), "limit": None}

    assert ("This check has written it too" in str(refused.value)) == (kind is not ComparesRows)
    assert sizing.goes_whole(refused.value) == (kind is ComparesRows)


class FunctionalCall(Writes):
    """Computes with other weights in its parameters' place."""

    def training_step(self, batch, batch_idx):
        fast = {name: 1.01 * one for name, one in self.net.named_parameters()}
        return torch.nn.functional.cross_entropy(torch.func.functional_call(self.net, fast, batch["x"]), batch["y"])


class FreezesForAPass(Writes):
    """Freezes a layer for a first pass, and unfreezes it."""

    def training_step(self, batch, batch_idx):
        with self.otherwise():
            target = self.net(batch["x"]).detach()
        return torch.nn.functional.cross_entropy(self.net(batch["x"]) + 0.1 * target, batch["y"])

    @contextmanager
    def otherwise(self):
        self.net[0].requires_grad_(requires_grad=False)
        yield
        self.net[0].requires_grad_(requires_grad=True)


class WritesForAPass(FreezesForAPass):
    """Puts a reference's values into its parameters for a first pass."""

    @contextmanager
    def otherwise(self):
        own = [parameter.data for parameter in self.net.parameters()]
        for parameter in self.net.parameters():
            parameter.data = torch.full_like(parameter, 0.1)
        yield
        for parameter, data in zip(self.net.parameters(), own, strict=True):
            parameter.data = data


class SwapsForAPass(FreezesForAPass):
    """Puts a reference's parameters in the place of its own for a first pass."""

    @contextmanager
    def otherwise(self):
        own = self.net[0].weight
        self.net[0].weight = torch.nn.Parameter(torch.full_like(own, 0.1), requires_grad=False)
        yield
        self.net[0].weight = own


@first_cells(1, "kind", [NormalizesBefore, FunctionalCall, FreezesForAPass, WritesForAPass, SwapsForAPass])
def test_parameters_that_are_written_before_their_use_train_as_with_whole_batches(kind):
    whole, _ = run(kind, "auto")
    split, _ = run(kind, UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(split), weights(whole), rtol=0, atol=1e-10)


REFUSED = {Normed: r"self\.size|size", Queue: "queue", Covariance: "mean", History: "outs"}


def run(kind, strategy, **options):
    torch.manual_seed(0)
    module = kind().double()
    seen, _ = fit(module, kind.loader(), strategy=strategy, **options)
    return module, seen


def state_of(module):
    buffers = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    names = ("calls", "rows", "average", "largest", "smallest", "total", "outs", "last", "kept", "depth", "large")
    return {**buffers, **{name: getattr(module, name) for name in names if name in vars(module)}}


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        compare(value, other[name], name)


def compare(one, other, name):
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)
    elif isinstance(one, dict):
        assert_close(one, other)
    elif isinstance(one, list):
        assert len(one) == len(other), name
        for each, twin in zip(one, other, strict=True):
            compare(each, twin, name)
    else:
        assert one == pytest.approx(other, rel=1e-6), name


@first_cells(
    8,
    ("kind", "window"),
    crossed(
        SAME,
        [1, 2],
        fast=[*((kind, 1) for kind in SAME if kind is not LargeBuffer), (AddedUp, 2), (Teacher, 2), (Outputs, 2)],
    ),
)
def test_state_that_the_step_writes_is_the_whole_batchs(kind, window):
    plain, _ = run(kind, "auto", accumulate_grad_batches=window)
    split, _ = run(kind, UnifiedStrategy(micro_batch_size=3), accumulate_grad_batches=window)

    assert_close(state_of(plain), state_of(split))


@first_cells(
    1, "kind", [Counter, slow(RunningLoss), RunningMean, Outputs, slow(OutputsByRow), Pending, slow(Kept), InstanceNorm]
)
def test_without_the_check_it_is_written_once_a_micro_batch(kind):
    """The negative twin: where nothing is known the writes of micro-batches stay as they come."""
    plain, _ = run(kind, "auto")
    split, _ = run(kind, UnifiedStrategy(micro_batch_size=3, check_split=False))

    with pytest.raises((AssertionError, RuntimeError)):
        assert_close(state_of(plain), state_of(split))


@first_cells(1, "kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_nothing_puts_together_is_refused_with_its_path(kind):
    with pytest.raises(
        SplitError, match=rf"^{kind.__name__} writes .*{REFUSED[kind]}.* in its step.*on_train_batch_end"
    ):
        run(kind, UnifiedStrategy(micro_batch_size=3))


@first_cells(2, "kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_refusal_comes_before_anything_is_written(kind):
    module = kind().double()
    before = weights(module)

    with pytest.raises(SplitError):
        fit(module, kind.loader(), strategy=UnifiedStrategy(micro_batch_size=3))

    assert torch.equal(weights(module), before)


class Steps(Writes):
    """Steps up or down by the sign of a mean of the batch."""

    size = 0.01

    def __init__(self):
        super().__init__()
        self.limit = 0.5

    def write(self, batch, out, loss):
        self.limit += self.size if batch["x"][:, 0].mean() > 0 else -self.size


def test_a_number_that_steps_by_a_mean_of_the_batch_is_refused_at_once():
    torch.manual_seed(0)
    module = Steps().double()
    x = torch.tensor([-1.0, -1, 1, -1, -1, 1, 1, 1], dtype=torch.float64)[:, None].expand(8, 6)
    rows = [{"x": one + 0.01 * index, "y": index % 4} for index, one in enumerate(x)]
    loader = torch.utils.data.DataLoader(rows, batch_size=8)

    with pytest.raises(SplitError, match=r"^Steps writes Steps\.limit in its step"):
        fit(module, loader, strategy=UnifiedStrategy(micro_batch_size=3))


def learnt(before, whole, values, weights=(1, 2, 5)):
    table = MergeTable()
    lacks = learn_entry(
        table,
        "limit",
        before,
        whole,
        values,
        MicroBatchWeights(list(weights), list(map(float, weights))),
        tolerance=1e-6,
    )
    return bool(lacks), table


@pytest.mark.parametrize(
    ("before", "whole", "values"),
    [
        (0.5, 0.51, [0.49, 0.51, 0.51]),
        (0.5, 0.49, [0.49, 0.49, 0.51]),
        (torch.tensor(0.5), torch.tensor(0.51), [torch.tensor(0.49), torch.tensor(0.49), torch.tensor(0.51)]),
    ],
)
def test_the_value_of_most_micro_batches_is_no_maximum_or_sum(before, whole, values):
    assert learnt(before, whole, values)[0]


@pytest.mark.parametrize(
    ("before", "whole", "values"),
    [(3.0, 7.0, [3.0, 7.0, 7.0]), (5.0, 7.0, [3.0, 6.0, 7.0]), (5, 5, [5, 5, 5]), (4, 5, [5, 5, 3])],
)
def test_extremes_of_rows_and_sums_of_counts_are_still_learnt(before, whole, values):
    lacks, table = learnt(before, whole, values)

    assert not lacks
    assert is_mergeable(table, "limit")


class Clock(Writes):
    """Values that two equal runs write differently are nobody's batch."""

    def __init__(self):
        super().__init__()
        self.began, self.numbers, self.name = 0.0, itertools.count(), None

    def write(self, batch, out, loss):
        self.began, self.name = time.perf_counter(), object()


class OwnGenerators(Writes):
    def __init__(self):
        super().__init__()
        self.draws, self.numpy, self.torch = random.Random(3), np.random.default_rng(3), torch.Generator()

    def write(self, batch, out, loss):
        self.draws.random(), self.numpy.random(), torch.rand(1, generator=self.torch)


@first_cells(1, "kind", [Clock, OwnGenerators])
def test_times_addresses_and_generators_are_left_as_they_come(kind):
    plain, _ = run(kind, "auto")
    split, _ = run(kind, UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)


def test_own_generators_advance_once_a_batch_where_micro_batches_draw_alike():
    plain, _ = run(OwnGenerators, "auto")
    split, _ = run(OwnGenerators, UnifiedStrategy(micro_batch_size=3))

    assert split.draws.getstate() == plain.draws.getstate()
    assert split.numpy.bit_generator.state == plain.numpy.bit_generator.state
    assert torch.equal(split.torch.get_state(), plain.torch.get_state())


class LateQueue(Queue):
    """Writes what nothing puts together from its third batch on, which is no news by itself."""

    steps = 0

    def write(self, batch, out, loss):
        self.steps += 1
        if self.steps >= 3:
            super().write(batch, out, loss)


def test_writes_that_begin_late_are_checked_before_their_update():
    plain, _ = run(LateQueue, "auto", max_steps=2)
    torch.manual_seed(0)
    module = LateQueue().double()

    with pytest.raises(SplitError, match="queue"):
        fit(module, LateQueue.loader(), strategy=UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-9, atol=1e-12)


class LateCounter(Counter):
    late = 0

    def write(self, batch, out, loss):
        super().write(batch, out, loss)
        if self.calls >= 3:
            self.late = self.late + len(out)


def test_writes_that_begin_late_and_can_be_put_together_are():
    plain, _ = run(LateCounter, "auto")
    split, _ = run(LateCounter, UnifiedStrategy(micro_batch_size=3))

    assert (split.calls, split.late) == (plain.calls, plain.late)


class OwnIterators(Writes):
    """Scales each batch's loss by the next number of two iterators."""

    def __init__(self):
        super().__init__()
        self.cycle, self.listed = itertools.cycle([1.0, 2.0, 5.0]), iter([1.0, 0.5, 0.25, 2.0] * 10)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * next(self.cycle) * next(self.listed)

    def write(self, batch, out, loss):
        pass


def test_own_iterators_advance_once_a_batch():
    plain, _ = run(OwnIterators, "auto")
    split, _ = run(OwnIterators, UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)
    assert (next(split.cycle), next(split.listed)) == (next(plain.cycle), next(plain.listed))


class Seen(Writes):
    """Marks the classes that it has seen, and those that it has not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("unseen", torch.ones(4, dtype=torch.bool))

    def write(self, batch, out, loss):
        self.seen[batch["y"]] = True
        self.unseen[batch["y"]] = False


def test_flags_are_put_together_by_or_and_and():
    plain, _ = run(Seen, "auto")
    split, _ = run(Seen, UnifiedStrategy(micro_batch_size=3))

    assert torch.equal(split.seen, plain.seen) and plain.seen.any()
    assert torch.equal(split.unseen, plain.unseen) and not plain.unseen.all()
