"""Further sizes traced on the first fake copy equal separate dry runs."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.memory.reserve import reserved_bytes
from lightning_unified.cost_model.trace.trace import Give, Take
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.dry_run import DryRuns, StepSpec, dry_run
from lightning_unified.planner.fake import mode as fake
from tests.support.lanes import slow, some
from tests.support.zoo.dry_run import Adversaries, Convolutions, LowRank, Perceptron, Transformer, trace_step

SIZES = ((8, 1), (2, 2), (4, 2))


class Switched(Transformer):
    """Recomputes by an attribute of its own.

    It names its blocks, so that some of them can be chosen.
    """

    recompute = False

    def __init__(self):
        super().__init__()
        self.recompute = True

    @property
    def recompute_blocks(self):
        return list(self.blocks)


def numbered(trace):
    """The trace, its storages numbered as they come."""
    numbers, events = {}, []
    for event in trace.events:
        if isinstance(event, Take):
            numbers[event.storage] = len(numbers)
            events.append((len(numbers) - 1, event.bytes, event.category))
        else:
            events.append(numbers[event.storage] if isinstance(event, Give) else event)
    return events, trace.rows, trace.num_micro_batches, trace.reads, trace.notes, trace.options


def followed(module, batch, **setting):
    """Traces of all sizes, and the number followed on an earlier fake copy."""
    recompute = setting.pop("recompute", None)
    dry_runs, traces, shared = DryRuns(StepSpec(module=module, batch=batch, **setting), recompute=recompute), [], 0
    for rows, num_micro_batches in SIZES:
        before = dry_runs._last
        traces.append(dry_runs.step(rows, num_micro_batches))
        shared += before is not None and dry_runs._last is before
    return traces, shared


POLICIES = (None, True, RecomputePolicy(blocks=1, keep_attention=True), False)


BOTH = ((8, 1), (4, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), [slow(Transformer, BOTH), slow(Switched, BOTH), (Switched, BOTH[1:])])
def test_steps_with_other_recomputed_blocks_are_traced_on_the_same_fake_copy(kind, sizes):
    module, batch, fake_copies = kind(), kind.batch(8), {}
    setting = {"backend": "cuda", "precision": "bf16-mixed"}
    step = StepSpec(module=module, batch=batch, **setting)
    asked = [DryRuns(step, recompute=policy, fake_copies=fake_copies) for policy in POLICIES]
    traces = [dry_runs.step(rows, num_micro_batches) for dry_runs in asked for rows, num_micro_batches in sizes]
    alone = [
        trace_step(module, batch, recompute=policy, rows=rows, num_micro_batches=num_micro_batches, **setting)
        for policy in POLICIES
        for rows, num_micro_batches in sizes
    ]

    assert len({id(dry_runs._last) for dry_runs in asked}) == 1
    assert list(map(summed_up, traces)) == list(map(summed_up, alone))


def summed_up(trace):
    """All of the trace but the order in which what is there before the step began to live."""
    takes = Counter((event.bytes, event.category) for event in trace.events if isinstance(event, Take))
    works = [event for event in trace.events if not isinstance(event, (Take, Give))]
    return works, takes, peak(trace).bytes, reserved_bytes(trace), numbered(trace)[1:]


def by_themselves(module, batch, **setting):
    return [
        trace_step(module, batch, rows=rows, num_micro_batches=num_micro_batches, **setting)
        for rows, num_micro_batches in SIZES
    ]


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        slow(Convolutions, {"precision": "bf16-mixed"}),
        (LowRank, {}),
        slow(Transformer, {"precision": "bf16-mixed", "backend": "cuda", "recompute": True}),
    ],
)
def test_steps_on_one_fake_copy_are_those_of_dry_runs_of_their_own(kind, setting):
    module, batch = kind(), kind.batch(8)
    traces, shared = followed(module, batch, **setting)

    assert shared == 2
    assert list(map(numbered, traces)) == list(map(numbered, by_themselves(module, batch, **setting)))


@pytest.mark.slow
def test_with_metrics_steps_on_one_fake_copy_take_what_those_of_their_own_take():
    module, batch = Perceptron(), Perceptron.batch(8)
    traces, shared = followed(module, batch)

    def taken(trace):
        return peak(trace).bytes, peak(trace).categories, reserved_bytes(trace)

    assert shared == 2
    assert list(map(taken, traces)) == list(map(taken, by_themselves(module, batch)))


class Keeps(Transformer):
    """Keeps what its subclasses say, from one step to the next."""

    def training_step(self, batch, batch_idx):
        logits = self.head(self.blocks[0](self.tokens(batch["tokens"])))
        self.keep(logits.detach())
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class KeepsRows(Keeps):
    def keep(self, logits):
        self.last = logits


class KeepsAll(Keeps):
    def keep(self, logits):
        self.all = [*getattr(self, "all", ()), logits.mean()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", some([KeepsRows, KeepsAll, Adversaries], KeepsRows))
def test_where_a_step_finds_what_others_left_each_is_traced_by_itself(kind):
    module, batch = kind(), kind.batch(8)
    traces, shared = followed(module, batch)

    assert shared == 0
    assert list(map(numbered, traces)) == list(map(numbered, by_themselves(module, batch)))


def test_a_step_that_counts_itself_finds_its_count_as_it_was():
    class Alternates(Transformer):
        def __init__(self):
            super().__init__(layers=1)
            self.calls = 0
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def training_step(self, batch, batch_idx):
            self.calls += 1
            self.seen += 1
            often = self.trainer.global_step + batch_idx + self.calls + int(self.seen)
            return super().training_step(batch, batch_idx) * torch.ones(1000 * often).sum()

    traces, shared = followed(Alternates(), Transformer.batch(8))

    assert shared >= 1
    assert list(map(numbered, traces)) == list(map(numbered, by_themselves(Alternates(), Transformer.batch(8))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", some([Convolutions, Transformer], Convolutions))
def test_remembered_fakes_tell_the_step_that_torchs_own_mode_tells(kind, monkeypatch):
    setting = {"rows": 2, "num_micro_batches": 2, "backend": "cuda", "precision": "bf16-mixed"}
    quick = trace_step(kind(), kind.batch(4), **setting)
    monkeypatch.setattr(fake, "CachedFakeMode", partial(FakeTensorMode, allow_non_fake_inputs=True))

    assert numbered(quick) == numbered(trace_step(kind(), kind.batch(4), **setting))


@pytest.mark.parametrize(("parts", "stays"), [((), False), (("net.0", "net.2"), False), (("net",), True)])
def test_gradients_stay_from_step_to_step_if_graphs_replay_all_that_is_trained(parts, stays, monkeypatch):
    monkeypatch.setattr(dry_run, "replayed_parts", lambda _: parts)
    batch = torch.randn(8, 64), torch.zeros(8, dtype=torch.long)
    trace = trace_step(Perceptron(), batch, backend="cuda", rows=4, num_micro_batches=2)
    freed = {event.storage for event in trace.events if isinstance(event, Give)}
    before = [event.storage for event in trace.events if isinstance(event, Take) and event.category == "gradients"]

    assert trace.replayed == parts
    assert before
    assert (not freed & set(before)) is stays
