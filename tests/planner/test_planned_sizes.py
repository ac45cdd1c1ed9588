"""Which sizes of a step are traced, and with how many rows in the second part."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.trace.trace import Take, Trace, Work
from lightning_unified.options import MemoryOptions
from lightning_unified.planner.first_batch.decide import StepPlan
from lightning_unified.planner.first_batch.planning import StepPlanning
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.traced_sizes import TracedSizes
from lightning_unified.step.exactness.losses import LossRule
from lightning_unified.step.exactness.verdict import Verdict
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.split import BatchShape
from tests.support.zoo.dry_run import Perceptron, trace_step


def made(asked, rows, num_micro_batches, second):
    asked.append((rows, num_micro_batches, second))
    held = rows + (num_micro_batches - 1) * second
    events = (Take(0, 8 * held, "batch"), Work("mm", "forward"), Take(1, 100 * rows, "activations"))
    return Trace(events=events, rows=rows, num_micro_batches=num_micro_batches, backend="cpu")


def sizes(rows):
    asked = []
    return TracedSizes(partial(made, asked), rows=rows, unit=1, row_bytes=8, workspaces=False), asked


def batch_of(trace):
    return sum(event.bytes for event in trace.events if isinstance(event, Take) and event.category == "batch")


def test_a_small_size_that_does_not_divide_evenly_is_traced_as_it_is_to_run():
    step, asked = sizes(10)

    assert batch_of(step.at(4, num_micro_batches=3)) == 8 * 10
    assert asked == [(4, 2, 3)]


def test_after_a_few_a_large_size_lies_on_lines_until_it_is_asked_for_exactly():
    step, asked = sizes(100)
    for rows, num_micro_batches in ((50, 2), (26, 4), (25, 4), (34, 3)):
        step.at(rows, num_micro_batches=num_micro_batches)

    assert asked == [(50, 2, 50), (26, 2, 26), (25, 2, 25), (2, 2, 2), (4, 2, 4)]
    assert batch_of(step.exactly(34, num_micro_batches=3)) == 8 * 100
    assert asked[-1] == (34, 2, 33)


def test_the_later_micro_batches_of_a_dry_run_can_be_smaller():
    even = trace_step(Perceptron(), Perceptron.batch(4), rows=4, num_micro_batches=2)
    uneven = trace_step(Perceptron(), Perceptron.batch(4), rows=4, num_micro_batches=2, later_rows=3)

    assert batch_of(even) - batch_of(uneven) == 64 * 4 + 8  # one row and its label


def test_what_a_check_of_the_split_took_of_a_gpu_is_given_back_once():
    class Watch:
        device, machine = torch.device("cuda"), None
        released = 0

        def release(self):
            self.released += 1

    watch = Watch()
    policy = MemoryPolicy(MemoryOptions(), watch)
    verdict = Verdict(rule=LossRule("rows"), conclusive=True, reason="rows")
    for _ in range(2):
        policy.splits.record(verdict)

    assert watch.released == 1


@pytest.mark.parametrize(("later", "proven"), [("32-true", True), ("bf16-mixed", False)])
def test_sizes_that_ran_under_other_memory_options_are_not_proven(later, proven):
    policy = MemoryPolicy(MemoryOptions(), SimpleNamespace(device=torch.device("cpu"), machine=None))
    planning = StepPlanning(SimpleNamespace(), policy, SimpleNamespace(), precision="32-true")
    short, prediction = (
        BatchShape(rows=16, elements=4700),
        Prediction(peak_bytes=1, reserved_bytes=1, categories={}, confidence="high", seconds=1.0, instant="", rows=16),
    )
    for precision in ("32-true", later):
        combination = Combination(precision=precision)
        plan = StepPlan(combination=combination, micro_batch_size=16, num_micro_batches=1, refused=None, reason="")
        planner = SimpleNamespace(kind=str)
        planning.apply(SimpleNamespace(plan=plan, prediction=prediction, planner=planner), None)
        if precision == "32-true":
            policy.sizes.worked(short)

    assert policy.sizes.is_proven(short) is proven
