"""The chosen plan fits, is the fastest that fits, and is never slower with a larger budget."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.cost_model.candidates import Choice, even_splits
from lightning_unified.cost_model.rates import Alignment
from lightning_unified.cost_model.rates.cost import split_seconds
from lightning_unified.cost_model.search import Option, search, what_would_fit
from tests.support.memory.made_traces import MadeTraces, rates, taken

GFLOP = 10**9


def recomputing(share, *, per_row=100, again=0.5):
    """An option that keeps less and computes `share` of the forward pass again."""
    extra = ((0, int(share * GFLOP), 0, int(share * 10**6)),) if share else ()
    traces = MadeTraces(per_row=per_row, works=((0, GFLOP, 0, 10**6), *extra))
    return Option(
        traces=traces, recompute="all" if share else "none", again=again if share else 0.0, changes=int(share > 0)
    )


def find(options, budget, *, rows=16, **how):
    return search(options, budget_bytes=budget, taken=how.pop("taken", taken), rows=rows, rates=rates(), **how)


def test_a_budget_without_bounds_runs_the_whole_batch_with_nothing_recomputed():
    choice = find([recomputing(0), recomputing(1, per_row=20)], 10**9)

    assert (choice.best.micro_batch_size, choice.best.num_micro_batches, choice.best.recompute) == (16, 1, "none")


def test_options_that_the_whole_batch_outdoes_are_not_traced():
    slower = recomputing(1, per_row=20)
    find([recomputing(0), slower], 10**9)

    assert slower.traces.asked == []


def test_an_option_that_would_be_slower_even_whole_is_not_split():
    slower = recomputing(9, per_row=60)
    choice = find([recomputing(0), slower], 1000 + 100 * 8)

    assert (choice.best.num_micro_batches, choice.best.recompute) == (2, "none")
    assert set(slower.traces.asked) == {(16, 1)}


def test_the_micro_batch_is_the_largest_that_fits():
    choice = find([recomputing(0)], 1000 + 100 * 6)

    assert (choice.best.micro_batch_size, choice.best.num_micro_batches) == (6, 3)
    assert choice.best.reserved_bytes == 1600


def test_what_the_allocator_takes_decides_and_not_what_lives():
    choice = find([recomputing(0)], 1000 + 100 * 6, taken=partial(taken, times=1.2))

    assert choice.best.micro_batch_size == 3
    assert (choice.best.peak_bytes, choice.best.reserved_bytes) == (1300, 1560)


def test_the_whole_batch_lives_beside_its_micro_batches():
    options = [Option(traces=MadeTraces(batch_row=100))]

    assert find(options, 1000 + 100 * 16 + 100 * 4).best.micro_batch_size == 4
    assert find(options, 1000 + 100 * 16).best is None


def test_cutting_wins_where_launches_cost_less_than_recomputation():
    choice = find([recomputing(0), recomputing(1, per_row=20)], 1000 + 100 * 8)

    assert (choice.best.num_micro_batches, choice.best.recompute) == (2, "none")
    assert choice.alternatives[0].recompute == "all"
    assert choice.alternatives[0].seconds > choice.best.seconds


def test_recomputation_wins_where_each_micro_batch_costs_much():
    costly = ((20 * GFLOP, GFLOP, 0, 10**6),)
    plain = Option(traces=MadeTraces(works=costly))
    saving = Option(
        traces=MadeTraces(per_row=20, works=(*costly, (0, GFLOP // 2, 0, 0))), recompute="all", again=1.0, changes=1
    )
    choice = find([plain, saving], 1000 + 100 * 8)

    assert (choice.best.num_micro_batches, choice.best.recompute) == (1, "all")


def test_of_equal_plans_the_one_that_changes_less_of_what_the_user_set_is_chosen():
    kept = Option(traces=MadeTraces(), changes=0)
    changed = Option(traces=MadeTraces(), optimizer_kernel="foreach", changes=1)

    assert find([changed, kept], 10**9).best.optimizer_kernel is None


@pytest.mark.parametrize("sizes", [(50, 40), (40, 50)], ids=str)
def test_of_equally_fast_plans_the_one_of_least_bytes_is_chosen(sizes):
    own = recomputing(0)
    chunked = [
        Option(traces=MadeTraces(per_row=size, works=((0, GFLOP, 0, 10**6),)), loss_chunk=size, changes=1)
        for size in sizes
    ]
    choice = find([own, *chunked], 1000 + 60 * 16)

    assert choice.best.seconds == choice.alternatives[0].seconds
    assert (choice.best.loss_chunk, choice.alternatives[0].loss_chunk) == (40, 50)


def test_a_faster_kernel_of_the_optimizer_is_chosen():
    own = Option(traces=MadeTraces(optimizer=(0, 10**9)))
    fused = Option(traces=MadeTraces(optimizer=(0, 10**8)), optimizer_kernel="fused", changes=1)

    assert find([own, fused], 10**9).best.optimizer_kernel == "fused"


def test_rows_that_stay_together_are_not_parted():
    choice = find([recomputing(0)], 1000 + 100 * 7, unit=4)

    assert (choice.best.micro_batch_size, choice.best.num_micro_batches) == (4, 4)


def test_a_batch_that_cannot_be_split_is_planned_whole_or_not_at_all():
    options = [recomputing(0), recomputing(1, per_row=20)]

    assert find(options, 1000 + 100 * 8, unit=16).best.recompute == "all"
    assert find(options, 1000, unit=16).best is None


def test_the_largest_micro_batch_that_the_user_allows_is_not_exceeded():
    assert find([recomputing(0)], 10**9, micro_batch_size=5).best.micro_batch_size == 4


def test_when_nothing_fits_each_options_lower_bound_is_shown():
    choice = find([recomputing(0), recomputing(1, per_row=20)], 900)

    assert choice.best is None
    assert [need for _, need in what_would_fit(choice)] == [1020, 1100]
    assert choice.reason == (
        "no plan fits into 900 B: 16 micro-batches of 1 row, activation checkpointing: all, 32-true needs 1020 B; "
        "16 micro-batches of 1 row, no activation checkpointing, 32-true needs 1.07 KiB"
    )


def test_the_reason_names_the_plan_its_rival_and_what_did_not_fit():
    reason = find([recomputing(0), recomputing(1, per_row=20)], 1000 + 100 * 8).reason

    assert reason.startswith("2 micro-batches of up to 8 rows, no activation checkpointing, 32-true: ")
    assert "; next, the whole batch of 16 rows at once, activation checkpointing: all, 32-true: " in reason
    assert reason.endswith("; the whole batch at once, activation checkpointing: none, would take 2.54 KiB or more")


@pytest.mark.parametrize(("backend", "hint"), [("cuda", True), ("mps", False)])
def test_the_reason_says_how_long_a_gpu_waits_for_the_host(backend, hint):
    traces = MadeTraces(works=((0, 10, 0, 10),) * 100, backend=backend)
    choice = search(
        [Option(traces=traces)], budget_bytes=10**9, taken=taken, rows=16, rates=rates(launch=1e-4, kernel=1e-6)
    )

    # 200 operations of 1e-4 s for the host, and of 1e-6 s for the device; the optimizer's 1e-3 s are the device's
    assert choice.best.waiting_seconds == pytest.approx(200 * 1e-4 - 200 * 1e-6, rel=1e-3)
    assert "; in 19.8 ms of a step the GPU waits for the host" in choice.reason
    assert ("which the callback CudaGraphs can avoid" in choice.reason) == hint


def test_a_device_that_is_busy_and_a_cpu_do_not_wait():
    busy = find([recomputing(0)], 10**9)
    alone = find([Option(traces=MadeTraces(works=((0, 10, 0, 10),) * 100, backend="cpu"))], 10**9)

    assert busy.best.waiting_seconds == alone.best.waiting_seconds == 0
    assert "waits for the host" not in busy.reason + alone.reason


def test_without_options_there_is_no_search():
    with pytest.raises(ValueError, match="at least one option"):
        find([], 10**9)


def aligned(multiple, gain):
    return Alignment(
        device="x",
        dtype="bfloat16",
        seconds_per_row={},
        without={},
        multiple=multiple,
        gain=gain,
        source="made by hand",
    )


def test_an_aligned_size_is_taken_where_it_is_measurably_faster():
    options = [Option(traces=MadeTraces())]
    budget = 1000 + 100 * 40

    assert find(options, budget, rows=96).best.micro_batch_size == 32
    assert find(options, 1000 + 100 * 50, rows=96, alignment=aligned(32, 1.5)).best.micro_batch_size == 32
    assert find(options, 1000 + 100 * 50, rows=96, alignment=aligned(1, 1.0)).best.micro_batch_size == 48


def test_a_small_gain_of_alignment_does_not_pay_for_another_micro_batch():
    costly = [Option(traces=MadeTraces(works=((20 * GFLOP, GFLOP, 0, 10**6),)))]

    assert find(costly, 1000 + 100 * 50, rows=96, alignment=aligned(32, 1.01)).best.micro_batch_size == 48


def test_rows_of_an_aligned_length_are_aligned_in_any_number():
    options = [Option(traces=MadeTraces(length=128))]

    assert find(options, 1000 + 100 * 50, rows=96, alignment=aligned(64, 1.5)).best.micro_batch_size == 48


class Least(NamedTuple):
    """What a step takes at least, by its micro-batches."""

    seconds: float
    each: float = 0.0

    def __call__(self, num_micro_batches):
        return self.seconds + num_micro_batches * self.each


works = st.tuples(st.integers(0, 10**10), st.integers(0, 10**10), st.integers(0, 10**9), st.integers(0, 10**9))
made_options = st.builds(
    Option,
    traces=st.builds(
        MadeTraces,
        fixed=st.integers(0, 10**6),
        per_row=st.integers(0, 10**5),
        batch_row=st.integers(0, 10**5),
        works=st.lists(works, min_size=1, max_size=4).map(tuple),
        optimizer=st.tuples(st.integers(0, 10**10), st.integers(0, 10**9)),
        backend=st.just("cuda"),
    ),
    precision=st.sampled_from(["32-true", "bf16-mixed"]),
    changes=st.integers(0, 3),
    least_seconds=st.sampled_from([None, Least(1e-9), Least(0.1), Least(0.0, 1e-3)]),
)


@settings(deadline=None, max_examples=150)
@given(
    options=st.lists(made_options, min_size=1, max_size=4),
    rows=st.integers(1, 70),
    unit=st.sampled_from([1, 2, 4]),
    budgets=st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)).map(sorted),
    wiggle=st.lists(st.floats(1.0, 1.3), min_size=1, max_size=5),
    align=st.sampled_from([None, aligned(8, 1.2), aligned(4, 1.02)]),
)
def test_a_larger_budget_never_gives_a_slower_plan(options, rows, unit, budgets, wiggle, align):
    def uneven(trace):  # an allocator's rounding: not even monotone in the rows
        return taken(trace, times=wiggle[trace.rows % len(wiggle)])

    small, large = (
        find(options, budget, rows=rows, unit=unit, taken=uneven, alignment=align).best for budget in budgets
    )
    if small is not None:
        assert large is not None
        assert large.seconds <= small.seconds * (1 + 1e-12)
        assert small.reserved_bytes <= budgets[0]
        assert large.reserved_bytes <= budgets[1]


@settings(deadline=None, max_examples=100)
@given(option=made_options, rows=st.integers(1, 70), budget=st.integers(1, 10**7))
def test_no_split_that_fits_is_faster_than_the_chosen_one(option, rows, budget):
    found = [
        split_seconds(
            lambda rows, num_micro_batches: option.traces.at(rows, num_micro_batches=num_micro_batches), split, rates()
        )
        for split in even_splits(rows)
        if option.traces.peak_bytes(split[0], num_micro_batches=len(split)) <= budget
    ]
    best = find([option], budget, rows=rows).best

    assert (best is None) == (not found)
    if found:
        assert best.seconds == pytest.approx(
            max(min(found), (option.least_seconds or Least(0))(best.num_micro_batches)), rel=1e-9
        )


@settings(deadline=None, max_examples=100)
@given(
    option=made_options,
    extra=works,
    keeps=st.floats(0, 1),
    rows=st.integers(1, 40),
    budget=st.integers(1, 10**7),
    align=st.sampled_from([None, aligned(8, 1.2)]),
    floor=st.sampled_from([None, Least(1e-9)]),
)
def test_what_is_not_looked_at_would_not_have_won(option, extra, keeps, rows, budget, align, floor):
    plain = replace(option.traces)
    saving = replace(plain, per_row=int(keeps * plain.per_row), works=(*plain.works, extra))
    own = replace(option, traces=plain)
    other = replace(option, traces=saving, recompute="all", again=1.0, least_seconds=option.least_seconds or floor)
    alone = [find([one], budget, rows=rows, alignment=align).best for one in (own, other)]
    both = find([own, other], budget, rows=rows, alignment=align).best

    if both is None:
        assert alone == [None, None]
    else:
        assert both.seconds == min(plan.seconds for plan in alone if plan is not None)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    options=st.lists(made_options, min_size=1, max_size=4),
    rows=st.integers(1, 70),
    unit=st.sampled_from([1, 2]),
    budget=st.integers(1, 10**7),
    align=st.sampled_from([None, aligned(8, 1.2)]),
)
def test_a_search_split_by_split_in_order_of_lower_bounds_finds_the_same_plan(options, rows, unit, budget, align):
    options = [replace(option, least_seconds=option.least_seconds or Least(0)) for option in options]
    each = [replace(option, split=split) for option in options for split in even_splits(rows, unit=unit)]
    each.sort(key=lambda option: option.least_seconds(len(option.split)))
    full, quick = (
        find(asked, budget, rows=rows, unit=unit, alignment=align, own=options[0]) for asked in (options, each)
    )

    if full.best is None:
        assert quick.best is None
        assert {plan.reserved_bytes for plan in full.alternatives} == {
            plan.reserved_bytes for plan in quick.alternatives
        }
    else:
        assert quick.best.seconds == pytest.approx(full.best.seconds, rel=1e-9)


def test_a_smaller_loss_chunk_is_only_tried_for_fewer_micro_batches():
    fits, smaller, own = (
        replace(recomputing(0, per_row=per_row), loss_chunk=chunk, split=split)
        for per_row, chunk, split in ((100, 4096, (8, 8)), (50, 1024, (8, 8)), (100, None, (8, 8)))
    )
    find([fits, smaller, own], 1000 + 100 * 8, own=fits)
    assert smaller.traces.asked == []
    assert (8, 2) in own.traces.asked

    find([fits, replace(smaller, split=(16,))], 1000 + 100 * 8, own=fits)
    assert (16, 1) in smaller.traces.asked


def test_a_smaller_loss_chunk_that_recomputes_more_is_not_tried():
    fits, smaller, larger = (
        replace(recomputing(again, per_row=50), loss_chunk=chunk, split=(16,))
        for again, chunk in ((1, 1024), (2, 128), (2, 4096))
    )
    find([fits, smaller, larger], 1000 + 100 * 8, own=fits)
    assert smaller.traces.asked == []
    assert (16, 1) in larger.traces.asked


def test_a_slower_alternative_is_not_traced_for_another_loss_chunk():
    own, slow, again, other = (
        replace(recomputing(share, per_row=50), loss_chunk=chunk, attention=attention, least_seconds=Least(least))
        for share, chunk, attention, least in (
            (0, None, None, 0),
            (9, 64, "chunked", 9),
            (9, 128, "chunked", 9),
            (9, 128, None, 9),
        )
    )
    choice = find([own, slow, again, other], 1000 + 100 * 8)

    assert [one.traces.asked == [] for one in (own, slow, again, other)] == [False, False, True, False]
    assert {one.loss_chunk for one in (choice.best, *choice.alternatives)} == {None, 64, 128}


def test_what_comes_after_a_plan_that_is_faster_is_not_traced():
    quick, slow = (
        replace(recomputing(0), least_seconds=least, split=split)
        for least, split in ((Least(0), (16,)), (Least(9), (8, 8)))
    )
    find([quick, slow], 10**9)

    assert slow.traces.asked == []


def test_a_choice_lists_the_plans_of_an_earlier_search_once_and_in_order():
    def made(seconds, *, fits=True, size=8):
        return replace(find([recomputing(0)], 10**9).best, micro_batch_size=size, seconds=seconds, fits=fits)

    small, large = made(3.0, fits=False, size=1), made(9.0, fits=False, size=2)
    small, large = (replace(one, reserved_bytes=count) for one, count in ((small, 10), (large, 20)))
    first = Choice(best=made(2.0), alternatives=(made(4.0), large), reason="earlier")
    second = Choice(best=made(1.0), alternatives=(made(2.0), small), reason="now").beside(first)

    assert (second.best, second.reason) == (made(1.0), "now")
    assert second.alternatives == (made(2.0), made(4.0), small, large)
