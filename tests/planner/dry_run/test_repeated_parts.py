"""Dry runs of losses in many parts run one of them in place of all."""

import contextlib

import lightning as L
import pytest
import torch

from lightning_unified.cost_model.backends.reductions import with_sums
from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.cost_model.trace.trace import Give, Passes, Take, Work
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy
from lightning_unified.nn.token_log_probs import token_log_probs
from lightning_unified.planner.dry_run import DryRun, StepSpec, fake_fit
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.step_traces import StepTraces
from tests.support.lanes import first_cells


def cross_entropy(hidden, head, labels, chunk):
    return linear_cross_entropy(hidden, weight=head.weight, bias=head.bias, labels=labels, chunk_rows=chunk)


def summed_log_probs(hidden, head, labels, chunk):
    return -token_log_probs(hidden, head.weight, labels, bias=head.bias, chunk=chunk).sum()


def transformed(hidden, head, labels, chunk):
    return linear_cross_entropy(hidden, weight=head.weight, labels=labels, chunk_rows=chunk, transform=torch.tanh)


class Scores(L.LightningModule):
    """A linear layer of 1,000 classes whose loss runs in parts of `chunk` rows."""

    def __init__(self, loss, chunk):
        super().__init__()
        self.below, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 1000)
        self._loss, self._chunk = loss, chunk

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def training_step(self, batch, batch_idx):
        return self._loss(self.below(batch["x"]), self.head, batch["label"], self._chunk)


def traced(loss, chunk, *, backend, rows, **spec):
    batch = {"x": torch.zeros(rows, 16), "label": torch.zeros(rows, dtype=torch.long)}
    return DryRun(
        StepSpec(module=Scores(loss, chunk), batch=batch, backend=backend, precision="bf16-mixed", **spec)
    ).run(rows)


def sums(trace):
    """Return the floating-point operations, the bytes moved, and the kernels of a step."""
    works = [one for one in trace.events if isinstance(one, Work)]
    kernels = sum(one.kernels if isinstance(one, Passes) else 1 for one in works)
    return sum(one.flops for one in works), sum(one.moved for one in works), kernels


def buffers(trace):
    """Return the bytes of storages that live within one kernel."""
    pairs = zip(trace.events, trace.events[1:], strict=False)
    return {one.bytes for one, then in pairs if isinstance(one, Take) and then == Give(one.storage)}


@pytest.fixture
def every_part(monkeypatch):
    """Return a function that makes dry runs run every part."""
    return lambda: monkeypatch.setattr(fake_fit, "repeated_once", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.parametrize("loss", [cross_entropy, summed_log_probs, transformed])
@first_cells(1, "backend", ["cuda", "mps", "rocm"])
@first_cells(2, "rows", [8192 + 100, 3 * 1024, 1024 + 100, 2048, 1024, 100])
def test_one_part_counts_as_all_that_run_the_same_operations(loss, backend, rows, every_part):
    few = traced(loss, 1024, backend=backend, rows=rows)
    every_part()
    all_of_them = traced(loss, 1024, backend=backend, rows=rows)

    assert peak(few).bytes == peak(all_of_them).bytes
    assert allocator_peak(few).reserved == allocator_peak(all_of_them).reserved
    assert sums(few) == sums(all_of_them)
    few, all_of_them = with_sums(few), with_sums(all_of_them)
    assert allocator_peak(few).reserved == allocator_peak(all_of_them).reserved
    assert buffers(few) == buffers(all_of_them)


def test_the_number_of_parts_does_not_change_the_events():
    counts = {len(traced(cross_entropy, 64, backend="mps", rows=rows).events) for rows in (3 * 64, 9 * 64, 100 * 64)}

    assert len(counts) == 1


@pytest.mark.parametrize("loss", [cross_entropy, summed_log_probs, transformed])
def test_whole_parts_take_no_less_than_a_shorter_last_one(loss):
    rows = 1024 + 100
    whole, exact = (traced(loss, 1024, backend="mps", rows=rows, whole_chunks=one) for one in (True, False))

    assert peak(whole).bytes >= peak(exact).bytes
    assert sums(whole)[0] == pytest.approx(sums(exact)[0], rel=1e-3)


def test_a_cpus_heap_gets_every_part():
    trace = traced(cross_entropy, 64, backend="cpu", rows=640)

    assert not any(isinstance(one, Passes) for one in trace.events)
    assert sum("addmm" in one.op or ".mm." in one.op for one in trace.events if isinstance(one, Work)) >= 3 * 10


class Tokens(Scores):
    """The same layer for rows of many tokens."""

    def training_step(self, batch, batch_idx):
        hidden = self.below(batch["x"]).flatten(0, 1)
        return self._loss(hidden, self.head, batch["label"].flatten(), self._chunk)


@first_cells(1, "length", [155, 175, 190])  # 2 and 4 rows leave shorter last chunks that no line through them tells
@first_cells(1, "backend", ["mps", "cuda"])
def test_sizes_on_lines_take_the_bytes_of_their_own_dry_runs(length, backend):
    batch = {"x": torch.zeros(256, length, 16), "label": torch.zeros(256, length, dtype=torch.long)}
    step = StepSpec(module=Tokens(cross_entropy, 100), batch=batch, backend=backend, precision="bf16-mixed")
    combination = Combination(precision="bf16-mixed")
    on_lines, exact = (StepTraces(step).of(combination) for _ in range(2))
    for rows in (128, 86, 64):  # a search traces the first sizes
        on_lines.at(rows, num_micro_batches=2)

    for rows in (43, 32, 29):
        found = on_lines.at(rows, num_micro_batches=2)
        assert "interpolated" in found.notes[-1]
        assert peak(found).bytes == peak(exact.exactly(rows, num_micro_batches=2)).bytes
