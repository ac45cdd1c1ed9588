"""A plan is made from as few dry runs as decide it."""

import pytest

from lightning_unified.cost_model.rates import Rates
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import recompute_policies
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.search import compared, step_traces
from lightning_unified.planner.search import planner as planner_module
from lightning_unified.planner.search.combinations import combinations_to_compare
from lightning_unified.planner.search.planner import Planner
from lightning_unified.planner.search.step_traces import CountedMemory, StepTraces
from tests.support.lanes import crossed, first_cells
from tests.support.zoo.dry_run import Transformer

PLAIN, ALL = RecomputePolicy(blocks=0), RecomputePolicy(blocks="all")


@pytest.fixture
def traced(monkeypatch):
    """What was traced: what is recomputed, rows of a micro-batch, micro-batches."""
    asked, dry_runs = [], step_traces.DryRuns

    class Noted(dry_runs):
        def __init__(self, *args, recompute, **combination):
            super().__init__(*args, recompute=recompute, **combination)
            self.recompute = recompute

        def step(self, rows, num_micro_batches=1, later_rows=None):
            asked.append((self.recompute, rows, num_micro_batches))
            return super().step(rows, num_micro_batches, later_rows)

    monkeypatch.setattr(step_traces, "DryRuns", Noted)
    return asked


def rates(*, launch, part=0.0):
    return Rates(name="", flops={"float32": 1e9}, bandwidth=1e9, launch=launch, kernel=0.0, part=part, sources={})


class SlowLoss(Transformer):
    """A module whose own loss runs many operations, and whose loss in chunks runs few."""

    loss_chunk_rows = None

    def training_step(self, batch, batch_idx=0):
        loss = super().training_step(batch, batch_idx)
        if self.loss_chunk_rows is None:
            scale = loss.new_ones(4096)
            for _ in range(50):
                scale = scale * 1.0001
            loss = loss * scale.mean()
        return loss


def chosen(*, share, only_best=True, layers=2, kind=Transformer, chunks=(None,), **costs):
    """The best plan for a share of the undivided batch's memory.

    The machine's host needs a given time an operation or micro-batch.
    """
    module = kind(layers=layers)
    step = StepSpec(module=module, batch=Transformer.batch(8), backend="cuda")
    planner = Planner(StepTraces(step, counted=CountedMemory(workspaces=False)), rates=rates(**costs))
    combinations = combinations_to_compare("32-true", policies=recompute_policies(module), chunks=chunks)
    budget = int(share * planner.predict(combinations[0]).reserved_bytes)
    return planner.choose(combinations, budget_bytes=budget, rates=rates(**costs), only_best=only_best).best


def test_a_plan_that_no_other_setting_can_beat_has_no_other_traced(traced):
    best = chosen(share=0.75, launch=1e-9)

    assert (best.recompute, best.num_micro_batches) == ("none", 2)
    assert traced == [(PLAIN, 8, 1), (PLAIN, 4, 2)]


@pytest.mark.slow
def test_a_batch_is_not_traced_split_where_the_whole_is_always_faster(traced):
    best = chosen(share=0.9, layers=4, launch=1e-9, part=1.0)

    assert (best.recompute, best.num_micro_batches) == ("2 of 4 blocks", 1)
    assert {(rows, num_micro_batches) for _, rows, num_micro_batches in traced} == {(8, 1)}
    assert len(traced) < 4


@pytest.mark.slow
def test_a_busy_machine_looks_at_the_combinations_of_an_idle_one(traced, monkeypatch):
    chosen(share=0.9, layers=3, launch=1e-3, only_best=False)
    idle = list(traced)
    traced.clear()
    monkeypatch.setattr(planner_module.time, "monotonic", iter(range(0, 10**6, 100)).__next__)
    chosen(share=0.9, layers=3, launch=1e-3, only_best=False)

    assert traced == idle


@pytest.mark.slow
def test_a_long_search_ends_with_the_combinations_always_compared(traced, monkeypatch):
    monkeypatch.setattr(compared, "_MOST_OPERATIONS", 0)
    chosen(share=0.9, layers=3, launch=1e-3, only_best=False)

    assert {policy for policy, *_ in traced} == {PLAIN, ALL}


@first_cells(1, ("share", "launch"), crossed([1.0, 0.8], [1e-9, 1e-4], fast=[(1.0, 1e-9), (0.8, 1e-4)]))
def test_a_step_that_fits_keeps_its_own_loss_in_either_search(share, launch):
    given = {"share": share, "launch": launch, "kind": SlowLoss, "chunks": (None, 8)}
    quick, full = (chosen(**given, only_best=only) for only in (True, False))

    assert quick == full
    assert quick.loss_chunk == (None if share == 1.0 else 8)  # of a smaller budget, the loss in chunks takes less


@pytest.mark.slow
@pytest.mark.parametrize("launch", [1e-9, 1e-3])
def test_what_is_chosen_from_few_dry_runs_is_no_slower_than_what_is_chosen_from_all(launch):
    quick, full = (chosen(share=0.8, launch=launch, only_best=only) for only in (True, False))

    assert quick.seconds <= full.seconds * (1 + 1e-9)
