"""The budget of a completion: it follows what completions need, and cuts few."""

import random
from collections.abc import Callable

import pytest

from lightning_unified.models.grpo.batches.budget import CompletionBudget


def sampled(
    budget: CompletionBudget,
    *,
    steps: int,
    length: Callable[[random.Random], float],
    endless: float = 0.0,
    seed: int = 0,
) -> tuple[list[int], int, int]:
    """Return the limits of all steps, and counts of cut-off and of all completions that end.

    A step has 16 completions. Both counts are of completions that end within the largest limit.
    """
    dice, limits, cut, would = random.Random(seed), [], 0, 0
    for _ in range(steps):
        limits.append(budget.limit)
        needed = [10**9 if dice.random() < endless else max(1, round(length(dice))) for _ in range(16)]
        would += sum(one <= budget.most for one in needed)
        cut += sum(budget.limit < one <= budget.most for one in needed)
        budget.observe([min(one, budget.limit) for one in needed], [one <= budget.limit for one in needed])
    return limits, cut, would


def about_80(dice: random.Random) -> float:
    return dice.gauss(80, 8)


def test_answers_of_80_tokens_do_not_pay_for_512() -> None:
    limits, cut, would = sampled(CompletionBudget(512), steps=60, length=about_80)
    assert limits[0] == 512
    assert 96 <= max(limits[10:]) <= 160
    assert cut <= 0.02 * would


@pytest.mark.parametrize("seed", range(4))
def test_no_more_are_cut_than_allowed_where_lengths_have_a_long_tail(seed: int) -> None:
    _, cut, would = sampled(
        CompletionBudget(1024), steps=150, length=lambda dice: dice.lognormvariate(4.0, 0.6), seed=seed
    )
    assert 0 < cut <= 0.02 * would


def test_completions_that_never_end_do_not_keep_the_limit_at_the_most() -> None:
    limits, *_ = sampled(CompletionBudget(512), steps=60, length=about_80, endless=0.3)
    assert sorted(limits[20:])[20] <= 160


def test_the_limit_grows_with_answers_that_grow() -> None:
    budget = CompletionBudget(512)
    sampled(budget, steps=30, length=about_80)
    short = budget.limit
    limits, cut, would = sampled(budget, steps=60, length=lambda dice: dice.gauss(200, 15))
    assert short <= 160
    assert 230 <= limits[-1] <= 320
    assert cut <= 0.15 * would  # those of the first steps, before it knows


def test_the_limit_returns_to_the_most_where_completions_stop_to_end() -> None:
    budget = CompletionBudget(512)
    sampled(budget, steps=30, length=about_80)
    limits, *_ = sampled(budget, steps=30, length=about_80, endless=1.0)
    assert limits[-1] == 512


def test_the_limit_falls_with_answers_that_shrink() -> None:
    budget = CompletionBudget(512)
    sampled(budget, steps=30, length=lambda dice: dice.gauss(300, 20))
    limits, *_ = sampled(budget, steps=40, length=about_80)
    assert limits[-1] <= 160


def test_too_few_completions_change_nothing() -> None:
    budget = CompletionBudget(512)
    budget.observe([10] * 49, [True] * 49)
    assert budget.limit == 512


def test_the_limit_stays_where_nothing_ends() -> None:
    limits, *_ = sampled(CompletionBudget(512), steps=30, length=about_80, endless=1.0)
    assert set(limits) == {512}


@pytest.mark.parametrize(("most", "least"), [(512, 16), (8, 8)])
def test_the_limit_does_not_fall_below_the_least(most: int, least: int) -> None:
    budget = CompletionBudget(most)
    sampled(budget, steps=30, length=lambda _: 3)
    assert budget.limit == least


def test_a_budget_that_is_restored_goes_on_as_the_one_that_was_saved() -> None:
    first, second = CompletionBudget(512), CompletionBudget(512)
    sampled(first, steps=20, length=about_80, endless=0.1)
    second.load_state_dict(first.state_dict())
    assert sampled(first, steps=20, length=about_80, seed=1)[0] == sampled(second, steps=20, length=about_80, seed=1)[0]


def test_a_restored_limit_is_no_more_than_the_most_of_now() -> None:
    first, second = CompletionBudget(512), CompletionBudget(128)
    second.load_state_dict(first.state_dict())
    assert second.limit == 128


def test_a_limit_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="most=0"):
        CompletionBudget(0)
