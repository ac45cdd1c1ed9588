"""A split step at any row length, from dry runs at three lengths."""

import lightning as L
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.trace.interpolation import MisalignedError
from lightning_unified.cost_model.trace.trace import Work
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy
from lightning_unified.planner.dry_run import DryRun, DryRuns, StepSpec
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.row_lengths import RowLengths, aligned
from lightning_unified.planner.search.step_traces import StepTraces
from lightning_unified.units import MIB
from tests.support.lanes import first_cells, some

ROWS, WIDTH = 16, 8


class Attends(L.LightningModule):
    """One attention layer for rows of any length; `ragged` rows take memory by their values."""

    def __init__(self, *, ragged: bool = False):
        super().__init__()
        self.table, self.ragged = torch.nn.Embedding(50, WIDTH), ragged

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        tokens = batch["tokens"]
        rows = self.table(tokens).unflatten(2, (2, WIDTH // 2)).transpose(1, 2)
        mask = (tokens > 0)[:, None, None].expand(-1, 1, tokens.shape[1], -1)
        attended = functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask)
        kept = attended.mean() * torch.ones(int((tokens > 0).sum()), WIDTH) if self.ragged else attended
        return (kept**2).mean()


def tokens_of(*lengths):
    longest = max(lengths)
    rows = [[1] * length + [0] * (longest - length) for length in lengths]
    return {"tokens": torch.tensor(rows * (ROWS // len(rows)))}


def learnt(module, backend):
    step = StepSpec(module=module, batch=tokens_of(300, 120), backend=backend)
    combination, traces = Combination(precision="32-true"), StepTraces(step)
    traces.of(combination).exactly(4, num_micro_batches=4)
    lengths = RowLengths(traces, combination)
    lengths.learn(tokens_of(260, 50), length=260)
    return lengths


class Mixes(Attends):
    """Takes a storage whose bytes are a sum of three terms."""

    def training_step(self, batch, batch_idx):
        rows, length = batch["tokens"].shape
        return super().training_step(batch, batch_idx) * torch.ones(300 + rows * (70 + length), WIDTH).square().mean()


@pytest.mark.parametrize(("kind", "sizes"), [(Attends, 3 + 1), (Mixes, 4 + 1)])
def test_a_fourth_size_is_traced_where_three_leave_none_to_spare(kind, sizes, monkeypatch):
    traced, step = [], DryRuns.step
    monkeypatch.setattr(DryRuns, "step", lambda *asked, **other: traced.append(other) or step(*asked, **other))
    module = kind()
    lengths = learnt(module, "mps")
    found = lengths.sizes(511, rows=ROWS, row_bytes=0)._trace(5, 2, 5)
    own = DryRun(StepSpec(module=module, batch=tokens_of(511, 70), backend="mps")).run(5, 2, 5)

    assert sum(other.get("length") is not None for other in traced) == sizes
    assert peak(found).bytes == peak(own).bytes


@pytest.mark.parametrize("backend", some(["cuda", "mps"], "mps"))
def test_another_length_takes_the_bytes_of_its_own_dry_run(backend):
    module = Attends()
    lengths = learnt(module, backend)

    for length, first, later in ((127, 4, 4), (511, 6, 5)):
        found = lengths.sizes(length, rows=ROWS, row_bytes=0)
        own = DryRun(StepSpec(module=module, batch=tokens_of(length, 70), backend=backend)).run(first, 2, later)
        assert peak(found._trace(first, 2, later)).bytes == peak(own).bytes


@pytest.mark.slow
@pytest.mark.parametrize("backend", some(["cuda", "mps"], "cuda"))
def test_the_plans_own_dry_runs_give_the_longest_of_three_lengths(backend):
    module, planned = Attends(), 300
    traces = StepTraces(StepSpec(module=module, batch=tokens_of(planned, 120), backend=backend))
    combination = Combination(precision="32-true")
    for rows in (4, 8):
        traces.of(combination).exactly(rows, num_micro_batches=ROWS // rows)
    lengths, traced = RowLengths(traces, combination), traces.operations
    lengths.learn(tokens_of(260, 50), length=260)
    own = DryRun(StepSpec(module=module, batch=tokens_of(300, 70), backend=backend)).run(4, 2, 4)
    operations = sum(isinstance(event, Work) for event in own.events)

    assert traces.operations - traced < 3.5 * operations  # two further lengths, and the batch that confirms
    assert [lengths.aligned(length) for length in (44, 45, 172, 260, 300)] == [44, 172, 172, 300, 300]
    for length, first, later in ((172, 4, 4), (300, 6, 5), (556, 5, 5)):
        found = lengths.sizes(length, rows=ROWS, row_bytes=0)
        one = DryRun(StepSpec(module=module, batch=tokens_of(length, 70), backend=backend)).run(first, 2, later)
        assert peak(found._trace(first, 2, later)).bytes == peak(one).bytes


@first_cells(1, "planned", [304, 200])
def test_a_planned_length_that_is_not_padded_or_too_short_gives_no_lines(planned):
    traces = StepTraces(StepSpec(module=Attends(), batch=tokens_of(planned, 120), backend="cuda"))
    combination = Combination(precision="32-true")
    for rows in (4, 8):
        traces.of(combination).exactly(rows, num_micro_batches=ROWS // rows)
    lengths = RowLengths(traces, combination)
    lengths.learn(tokens_of(190, 50), length=190)

    assert lengths.aligned(190) == 255


def test_a_step_that_takes_memory_by_its_values_is_refused():
    with pytest.raises(MisalignedError):
        learnt(Attends(ragged=True), "cuda")


def test_a_length_counts_as_a_longer_one_that_kernels_pad_by_one_entry():
    assert [aligned(length) for length in (1, 127, 128, 255, 256)] == [127, 127, 255, 255, 383]


def ragged_fit(*lengths):
    """Return the strategy of a fit whose batches have these longest rows."""
    strategy = UnifiedStrategy(simulate="h200", budget="12MiB", recompute=False, check_split=False)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Attends(), DataLoader([tokens_of(length, 40) for length in lengths], batch_size=None))
    assert strategy.recoveries == 0
    return strategy, [event.split(" in ")[0] for event in strategy.events]


def test_a_fit_of_ragged_rows_traces_no_length_twice(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_UNIFIED_CACHE", str(tmp_path))
    strategy, events = ragged_fit(200, 150, 240, 60)

    assert events.count("planned") == 1
    assert events.count("another row length planned") == 2
    assert strategy.simulated.allocator.peak_reserved <= 12 * MIB


def test_lengths_without_a_common_form_are_tried_once_for_the_same_options(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_UNIFIED_CACHE", str(tmp_path))
    tried = []

    def learn(self, batch, *, length):
        tried.append(length)
        raise MisalignedError("a loop over chunks has as many turns as the rows need")

    monkeypatch.setattr(RowLengths, "learn", learn)
    _, events = ragged_fit(160, 200, 240)

    assert tried == [200]
    assert events.count("planned") == 3


class Predicts(L.LightningModule):
    """A language model of one layer, whose loss runs in chunks."""

    loss_chunk_rows = None

    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, WIDTH), torch.nn.Linear(WIDTH, 50, bias=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        tokens = batch["tokens"]
        hidden = torch.tanh(self.table(tokens[:, :-1]))
        return linear_cross_entropy(
            hidden, weight=self.head.weight, labels=tokens[:, 1:], chunk_rows=self.loss_chunk_rows
        )


def flops(trace):
    return sum(one.flops for one in trace.events if isinstance(one, Work))


@first_cells(2, "chunk", [64, 1024, 400])
def test_a_loss_in_chunks_has_a_common_form_of_lengths(chunk):
    module, combination = Predicts(), Combination(precision="32-true", loss_chunk=chunk)
    traces = StepTraces(StepSpec(module=module, batch=tokens_of(300, 120), backend="cuda"))
    traces.of(combination).exactly(4, num_micro_batches=4)
    lengths = RowLengths(traces, combination)
    lengths.learn(tokens_of(260, 50), length=260)

    assert lengths.is_known
    for length, rows in ((127, 16), (511, 6)):
        found = lengths.sizes(length, rows=ROWS, row_bytes=0)._trace(rows, 2, rows)
        step = StepSpec(module=module, batch=tokens_of(length, 70), backend="cuda", loss_chunk=chunk)
        own = DryRun(step).run(rows, 2, rows)
        logits = 4 * 50 * chunk  # bytes of a whole last chunk, beside as many of their gradient and of temporaries
        assert peak(own).bytes <= peak(found).bytes <= peak(own).bytes + 4 * logits
        assert flops(found) == pytest.approx(flops(own), rel=1e-3)
