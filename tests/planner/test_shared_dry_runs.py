"""Memory options share a fake copy, phases share known blocks, and limits share replays."""

from collections import Counter

import pytest
import torch

from lightning_unified.cost_model.memory import limit as limits
from lightning_unified.cost_model.memory import reserve
from lightning_unified.cost_model.memory.limit import fits_within
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy
from lightning_unified.planner.dry_run import DryRun, StepSpec
from lightning_unified.planner.dry_run.fake_fit import FakeFit
from lightning_unified.planner.repeats import Twins
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.phases import Phases
from lightning_unified.planner.search.step_traces import SizeLimits, StepTraces
from lightning_unified.step.undo.plans import CopyBuffers
from tests.planner.dry_run.test_dry_runs import numbered, summed_up
from tests.planner.test_repeated_blocks import Stack, language
from tests.support.lanes import first_cells, slow
from tests.support.zoo.dry_run import trace_step

MPS = {"backend": "mps", "precision": "bf16-mixed"}


_COUNTS = Counter()


def note_block():
    """Count a call of a block, where the undo does not see it: what a closure holds would be put back."""
    _COUNTS["blocks"] += 1


@pytest.fixture
def counted(monkeypatch):
    """The number of fake copies, and of blocks whose forward pass ran."""
    _COUNTS.update(copies=-_COUNTS["copies"], blocks=-_COUNTS["blocks"])
    make, run = FakeFit.__init__, Stack.kind.forward

    def made(self, *args, **kwargs):
        _COUNTS["copies"] += 1
        make(self, *args, **kwargs)

    def forward(self, x):
        note_block()
        return run(self, x)

    monkeypatch.setattr(FakeFit, "__init__", made)
    monkeypatch.setattr(Stack.kind, "forward", forward)
    return _COUNTS


OPTIONS = ({}, {"loss_chunk": 8}, {"attention": "chunked"}, {"loss_chunk": 8, "attention": "chunked"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        slow(language("Qwen2", adapters=True), OPTIONS),
        slow(language("Qwen2"), OPTIONS),
        (language("Qwen2"), (OPTIONS[0], OPTIONS[3])),
    ],
)
def test_loss_chunks_and_attentions_are_traced_on_one_fake_copy(kind, options, counted):
    module, batch = kind(), kind.batch(4)
    traces = StepTraces(StepSpec(module=module, batch=batch, **MPS))
    found = [traces.of(Combination(precision="bf16-mixed", **each)).exactly(4, num_micro_batches=1) for each in options]

    assert counted["copies"] == 1
    assert [trace.options["precision"] for trace in found] == ["bf16-mixed"] * len(options)
    alone = [trace_step(module, batch, rows=4, num_micro_batches=1, **MPS, **each) for each in options]
    assert [summed_up(trace)[1:4] for trace in found] == [summed_up(trace)[1:4] for trace in alone]


class OffersChunk(Stack):
    """Its memory option is a plain attribute, as step counters are."""

    loss_chunk_rows = None

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(
            self.norm(x), weight=self.head.weight, labels=batch["labels"], chunk_rows=self.loss_chunk_rows
        )


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(2, None, None), slow((2, 1, 1, None, None)), slow((None, 2, 2, None))])
def test_each_loss_chunk_is_traced_as_alone_whatever_came_before(chunks, counted):
    module, batch = OffersChunk(), OffersChunk.batch(4)
    traces = StepTraces(StepSpec(module=module, batch=batch, **MPS))
    for count, chunk in zip((1, 1, 2, 2, 1), chunks, strict=False):
        of = Combination(precision="bf16-mixed", loss_chunk=chunk)
        found = traces.of(of).exactly(4 // count, num_micro_batches=count)
        alone = trace_step(module, batch, rows=4 // count, num_micro_batches=count, loss_chunk=chunk, **MPS)
        assert summed_up(found)[1:4] == summed_up(alone)[1:4]
    assert module.loss_chunk_rows is None


@pytest.mark.slow
def test_the_first_step_of_a_later_fake_copy_skips_known_blocks(counted):
    step, twins = StepSpec(module=Stack(), batch=Stack.batch(4), **MPS), Twins()
    first = DryRun(step, twins=twins).run(4)
    learnt, counted["blocks"] = counted["blocks"], 0
    second = DryRun(step, twins=twins).run(4)

    assert (learnt, counted["blocks"]) == (7 + 4, 4 + 4)
    assert numbered(second) == numbered(first)


@pytest.mark.slow
def test_another_attention_learns_no_block_anew(counted):
    module, batch = Stack(), Stack.batch(4)
    traces = StepTraces(StepSpec(module=module, batch=batch, **MPS))
    found, blocks = [], []
    for options in ({}, {"attention": "chunked"}):
        counted["blocks"] = 0
        found.append(traces.of(Combination(precision="bf16-mixed", **options)).exactly(4, num_micro_batches=1))
        blocks.append(counted["blocks"])

    assert blocks == [7 + 4, 4]
    alone = trace_step(module, batch, rows=4, num_micro_batches=1, attention="chunked", **MPS)
    assert summed_up(found[1])[1:4] == summed_up(alone)[1:4]


@first_cells(1, ("windows", "is_borrowed"), [([3] * 7, True), (range(7), True), ([3, 3, 3, 5, 3, 3, 3], False)])
def test_blocks_of_other_settings_are_no_twins_under_another_attention(windows, is_borrowed):
    module, known, other = Stack(), Twins(), Twins()
    DryRun(StepSpec(module=module, batch=Stack.batch(4)), twins=known).run(4)
    for block, window in zip(module.blocks, windows, strict=True):
        block.window = window
    other.borrow(known, list(module.blocks))

    assert bool(other.runs) == is_borrowed
    other.give_up()
    other.borrow(known, list(module.blocks))
    assert not other.runs  # runs that failed are not borrowed again


@pytest.mark.slow
def test_the_training_step_before_a_validation_step_skips_known_blocks(counted):
    class Validated(Stack):
        def validation_step(self, batch, batch_idx):
            return self.training_step(batch, batch_idx)

    module, batch, twins = Validated(), Stack.batch(4), Twins()
    DryRun(StepSpec(module=module, batch=batch, **MPS), twins=twins).run(4)
    step = StepSpec(module=module, batch=batch, train_batch=batch, accumulate=1, validates=True, **MPS)
    blocks, found = [], []
    for known in (twins.borrowed(), None):
        counted["blocks"] = 0
        found.append(DryRun(step, twins=known).run(4))
        blocks.append(counted["blocks"])

    assert blocks == [4 + 7, 7 + 7]
    assert numbered(found[0]) == numbered(found[1])


@pytest.mark.slow
def test_a_later_phase_learns_no_block_anew(counted):
    phases = Phases()
    steps = [StepSpec(module=Stack(), batch=Stack.batch(rows), **MPS) for rows in (4, 6)]
    blocks = []
    for step in steps:
        counted["blocks"] = 0
        traces = phases.traces(step, limits=SizeLimits())
        found = traces.of(Combination(precision="bf16-mixed")).exactly(traces.rows, num_micro_batches=1)
        blocks.append(counted["blocks"])

    assert blocks == [7 + 4, 4 + 4]
    full = Twins()
    full.give_up()
    assert summed_up(found)[:4] == summed_up(StepTraces(steps[1]).of(Combination(precision="bf16-mixed")).at(6))[:4]


def test_borrowed_blocks_that_differ_are_learnt_before_all_are_traced():
    twins = Twins()
    DryRun(StepSpec(module=Stack(), batch=Stack.batch(4)), twins=twins).run(4)
    borrowed = twins.borrowed()

    assert borrowed.runs == twins.runs != []
    borrowed.give_up()
    assert borrowed.runs is None
    borrowed.give_up()
    assert borrowed.runs == []


def test_a_trace_is_replayed_once_for_each_limit(monkeypatch):
    trace = trace_step(Stack(), Stack.batch(4), rows=4, num_micro_batches=1, **MPS)
    replays, run = [], reserve.Replay._run
    monkeypatch.setattr(reserve.Replay, "_run", lambda self: (replays.append(self), run(self))[1])
    plenty = 4 * allocator_peak(trace).reserved
    for _ in range(3):
        assert fits_within(trace, plenty)
        assert not fits_within(trace, 1)
        allocator_peak(trace)

    assert len(replays) == 2  # without a limit, and within the small one; the large one changes nothing


@pytest.mark.slow
@first_cells(1, "torch_version", [(2, 13), (2, 14)], ids=["heaps", "placement"])
def test_limits_between_which_no_comparison_changes_share_a_replay(torch_version):
    trace = trace_step(Stack(), Stack.batch(4), rows=4, num_micro_batches=1, **MPS)
    settings = AllocatorSettings(torch_version=torch_version)
    free = allocator_peak(trace, settings=settings).reserved
    sizes = [int(free * share / 100) for share in range(60, 130, 2)]
    shared = [limits._reserved_within(trace, size, settings) for size in sizes]
    alone = [limits._replayed(trace, size, settings, []) for size in sizes]

    assert shared == alone
    assert None in alone and free in alone
    assert len(trace.kept["alike", settings]) < len(sizes)


def test_copies_of_many_small_tensors_are_made_in_the_first_step_only():
    buffers, tensors = CopyBuffers(), [torch.zeros(4) for _ in range(100)]
    buffers.begin()
    kept = [buffers.take(tensor) for tensor in tensors]
    buffers.keep(kept)
    buffers.begin()

    assert [id(buffers.take(tensor)) for tensor in tensors] == list(map(id, kept))
