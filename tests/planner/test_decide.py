"""The plan of a step follows from its inputs alone."""

from dataclasses import replace

import pytest

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.search import Candidate, Choice
from lightning_unified.cost_model.trace.trace import Confidence
from lightning_unified.errors import BudgetError, DryRunError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.first_batch.decide import StepInputs, StepPlan, decide, needs_search, trusted
from lightning_unified.planner.search.combinations import (
    Combination,
    combinations_to_compare,
    with_larger_chunks,
    with_usual_chunks,
)
from lightning_unified.units import format_bytes

MIB = 1 << 20
PLAIN = Combination(precision="32-true", recompute=RecomputePolicy(blocks=0))
ALL = Combination(precision="32-true", recompute=RecomputePolicy(blocks="all"))
FUSED = Combination(precision="32-true", recompute=RecomputePolicy(blocks=0), optimizer_kernel="fused")


def prediction(*, rows=8, num_micro_batches=1, mib=4, confidence: Confidence = "high"):
    return Prediction(
        peak_bytes=mib * MIB,
        reserved_bytes=mib * MIB,
        categories={},
        confidence=confidence,
        seconds=1.0,
        instant="",
        rows=rows,
        num_micro_batches=num_micro_batches,
    )


def candidate(combination, *, rows=8, num_micro_batches=1, mib=4, fits=True):
    return Candidate(
        micro_batch_size=rows,
        num_micro_batches=num_micro_batches,
        recompute=str(combination.recompute),
        precision=combination.precision,
        optimizer_kernel=combination.optimizer_kernel,
        loss_chunk=combination.loss_chunk,
        peak_bytes=mib * MIB,
        reserved_bytes=mib * MIB,
        seconds=1.0,
        fits=fits,
    )


def inputs(*, combinations=(PLAIN, ALL), budget=5, own=None, fits=True, **changes):
    return StepInputs(
        combinations=combinations,
        own=own or prediction(),
        own_fits=fits,
        budget_bytes=budget * MIB,
        **{"rows": 8, "micro_batch_size": None, "module": "Net", **changes},
    )


def found(best, *others, reason="searched"):
    return Choice(best=best, alternatives=others, reason=reason)


@pytest.mark.parametrize(
    ("fits", "combinations", "needed"),
    [
        (True, (PLAIN,), False),
        (True, (PLAIN, ALL), False),
        (False, (PLAIN,), True),
        (False, (PLAIN, ALL), True),
        (True, (PLAIN, FUSED), True),  # another kernel may be faster
        (True, (FUSED,), False),  # the kernel was asked for
    ],
)
def test_a_search_is_needed_where_the_step_does_not_fit_or_a_kernel_is_open(fits, combinations, needed):
    assert needs_search(inputs(fits=fits, combinations=combinations)) is needed


OWN = StepPlan(
    combination=PLAIN, micro_batch_size=8, num_micro_batches=1, refused=None, reason="fits: 4.00 MiB of 5.00 MiB"
)
HALF, RECOMPUTED = candidate(PLAIN, rows=4, num_micro_batches=2), candidate(ALL)
SEARCHED = StepPlan(
    combination=ALL, micro_batch_size=8, num_micro_batches=1, refused=None, reason="searched", candidate=RECOMPUTED
)
SPLIT = replace(SEARCHED, combination=PLAIN, micro_batch_size=4, num_micro_batches=2, refused=8, candidate=HALF)
THIRDS = candidate(PLAIN, rows=3, num_micro_batches=3)
TIGHT = candidate(ALL, rows=1, num_micro_batches=8, mib=5, fits=False)

PLANS = {
    "the step as the user set it": (inputs(), OWN),
    "the size that was asked for": (
        inputs(own=prediction(rows=2, num_micro_batches=4), micro_batch_size=2),
        replace(OWN, micro_batch_size=2, num_micro_batches=4),
    ),
    "the best of the search": (inputs(fits=False, choice=found(RECOMPUTED)), SEARCHED),
    "its other results": (
        inputs(fits=False, choice=found(RECOMPUTED, HALF)),
        replace(SEARCHED, alternatives=(HALF,)),
    ),
    "a split batch": (inputs(fits=False, choice=found(HALF)), SPLIT),
    "a third of nine rows": (
        inputs(fits=False, rows=9, choice=found(THIRDS)),
        replace(SPLIT, micro_batch_size=3, num_micro_batches=3, refused=5, candidate=THIRDS),
    ),
    "less than was asked for": (
        inputs(fits=False, micro_batch_size=6, choice=found(HALF)),
        SPLIT,
    ),
    "no less than was asked for": (
        inputs(fits=False, micro_batch_size=4, choice=found(HALF)),
        replace(SPLIT, refused=None),
    ),
    "no rows to count": (inputs(fits=False, rows=None, choice=found(HALF)), replace(SPLIT, refused=None)),
    "the search, though the step fits": (inputs(combinations=(PLAIN, ALL), choice=found(RECOMPUTED)), SEARCHED),
    "the smallest, if it may fit after all": (
        inputs(fits=False, choice=found(None, replace(HALF, reserved_bytes=9 * MIB), TIGHT)),
        replace(
            SEARCHED,
            micro_batch_size=1,
            num_micro_batches=8,
            refused=2,
            candidate=TIGHT,
            alternatives=(replace(HALF, reserved_bytes=9 * MIB), TIGHT),
        ),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is(name):
    given, expected = PLANS[name]

    assert decide(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        inputs(fits=False, budget=4, choice=found(None, TIGHT)),  # five MiB live, four are left
        inputs(fits=False, budget=5, may_try=False, choice=found(None, TIGHT)),
    ],
)
def test_a_budget_that_no_plan_fits_is_refused_with_what_would_fit(given):
    with pytest.raises(
        BudgetError, match=r"(?s)MiB of the budget are left for the step of Net.*5\.00 MiB: 8 micro-batches of 1 row"
    ):
        decide(given)


def test_a_budget_that_the_process_alone_exceeds_is_never_shown_as_negative():
    given = replace(inputs(fits=False, budget=-4, choice=found(None, TIGHT)), beside_bytes=24 * MIB)
    with pytest.raises(BudgetError) as refused:
        decide(given)

    text = str(refused.value).splitlines()[0]
    assert "of the 20.00 MiB that this process may use, it holds 24.00 MiB" in text
    assert "nothing is left" in text
    assert f"the least budget is {format_bytes(24 * MIB + TIGHT.reserved_bytes)}" in text


def test_a_prediction_of_low_confidence_is_not_acted_on():
    with pytest.raises(DryRunError, match="made up"):
        trusted(prediction(confidence="low"))

    assert trusted(prediction(confidence="medium")).confidence == "medium"


def test_a_plan_with_a_larger_loss_chunk_keeps_its_other_options():
    policies = [RecomputePolicy(blocks=blocks, of=4) for blocks in (0, 1, 2, 3, "all")]
    compared = combinations_to_compare("32-true", policies=policies, chunks=(None, 4096, 1024, 128))
    larger = [other for one in compared for other in with_larger_chunks(one, compared)]

    assert set(larger) - set(compared)
    for one in larger:
        choice = found(candidate(one))
        assert decide(inputs(combinations=(*compared, *larger), fits=False, choice=choice)).combination == one


def test_a_quick_search_leaves_larger_loss_chunks_to_the_best_plan():
    policies = [RecomputePolicy(blocks=blocks, of=4) for blocks in (0, 2, "all")]
    kept = [replace(policies[-1], kept=0.5)]
    compared = combinations_to_compare(
        "32-true", policies=[*policies[:-1], *kept, policies[-1]], chunks=(None, 4096, 1024, 128)
    )
    usual = with_usual_chunks(compared)

    left_out = [one for one in compared if one not in usual]
    assert {one.loss_chunk for one in left_out} == {4096}
    assert {one.recompute for one in left_out} == {policies[0], policies[-1]}
    assert {one.loss_chunk for one in usual if one.recompute in kept} >= {1024, 4096}
    assert {larger.loss_chunk for one in usual for larger in with_larger_chunks(one, compared)} >= {4096}
