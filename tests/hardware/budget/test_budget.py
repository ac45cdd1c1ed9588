"""Budgets as written, resolved to bytes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_unified.errors import BudgetError
from lightning_unified.hardware import Figure, Reading, fixed_tiers, read, resolve_budget
from lightning_unified.hardware.budget import divide_budget, follow_budget, unified_reserve

GIB, MIB = 2**30, 2**20


def pool(*, total, available, allocated: int | None = 0, backend: Any = "cpu", kind: Any = "unified", host=None):
    figure = lambda count: Figure(count, "test" if count is not None else "unknown: test")  # noqa: E731
    return Reading(
        device=backend,
        backend=backend,
        name="test",
        pool=kind,
        total=figure(total),
        available=figure(available),
        allocated=figure(allocated),
        reserved=figure(None),
        peak=figure(None),
        host=figure(host),
    )


@st.composite
def pools(draw):
    total = draw(st.integers(8 * MIB, 1024 * GIB))
    allocated = draw(st.integers(0, total // 2))
    available = draw(st.integers(4 * MIB, total - allocated))
    backend, kind = draw(
        st.sampled_from([("cpu", "unified"), ("cuda", "dedicated"), ("mps", "unified"), ("rocm", "unified")])
    )
    host = int(total * 1.4) if backend == "mps" else total
    return pool(total=total, available=available, allocated=allocated, backend=backend, kind=kind, host=host)


@given(pools(), st.sampled_from(["auto", "60%", "100%", "leave 1MiB", "4GiB", "512MiB"]))
def test_no_budget_exceeds_its_pool(reading, spec):
    try:
        budget = resolve_budget(spec, reading)
    except BudgetError:
        return

    assert 0 < budget.bytes <= reading.total.bytes


@given(pools(), st.integers(0, 64 * GIB))
def test_auto_is_positive_and_grows_with_the_pool(reading, more):
    larger = pool(
        total=reading.total.bytes + more,
        available=reading.available.bytes + more,
        allocated=reading.allocated.bytes,
        backend=reading.backend,
        kind=reading.pool,
        host=reading.host.bytes + more,
    )

    assert 0 < resolve_budget("auto", reading).bytes <= resolve_budget("auto", larger).bytes


@given(pools(), st.integers(1, 100), st.integers(0, 64 * GIB))
def test_a_share_grows_with_the_pool(reading, percent, more):
    larger = pool(total=reading.total.bytes + more, available=1)

    assert resolve_budget(f"{percent}%", reading).bytes <= resolve_budget(f"{percent}%", larger).bytes


@given(st.integers(3 * MIB, 512 * GIB), st.integers(1, 64 * GIB))
def test_leave_takes_exactly_what_is_left(available, more):
    reading = pool(total=1024 * GIB, available=available + more)

    assert resolve_budget(f"leave {max(more, MIB)}", reading).bytes == available + more - max(more, MIB)


def test_an_amount_is_taken_as_written():
    budget = resolve_budget("28GiB", pool(total=32 * GIB, available=30 * GIB))

    assert (budget.bytes, budget.spec, budget.follows_others) == (28 * GIB, "28GiB", False)


def test_an_amount_may_be_a_count_of_bytes():
    assert resolve_budget(3 * GIB, pool(total=4 * GIB, available=GIB)).bytes == 3 * GIB


def test_an_amount_above_what_is_free_is_taken_and_the_reason_says_so():
    budget = resolve_budget("16GiB", pool(total=24 * GIB, available=3 * GIB))

    assert budget.bytes == 16 * GIB
    assert "only 3.00 GiB of it is available now" in budget.reason


def test_an_amount_as_large_as_the_pool_is_accepted():
    assert resolve_budget("24GiB", pool(total=24 * GIB, available=3 * GIB)).bytes == 24 * GIB


def test_an_amount_above_the_pool_names_the_largest_tier_and_amount_that_fit():
    reading = pool(total=24 * GIB, available=20 * GIB)
    with pytest.raises(
        BudgetError,
        match=r"28.00 GiB is above the pool of cpu, 24.00 GiB .*memory=medium \(16.00 GiB\), the largest amount 24.00",
    ):
        resolve_budget("28GiB", reading)


def test_an_amount_above_a_pool_smaller_than_every_tier_names_the_amount():
    with pytest.raises(BudgetError, match=r"no fixed tier fits; use memory=auto, or an amount up to 2\.00 GiB"):
        resolve_budget("4GiB", pool(total=2 * GIB, available=GIB))


def test_an_amount_is_taken_where_the_size_of_the_pool_is_unknown():
    assert resolve_budget("4GiB", pool(total=None, available=None)).bytes == 4 * GIB


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ("60%", "needs the size of the pool"),
        ("auto", "needs what is available"),
        ("leave 2GiB", "needs what is available"),
    ],
)
def test_what_needs_an_unknown_figure_is_refused(spec, missing):
    with pytest.raises(BudgetError, match=missing):
        resolve_budget(spec, pool(total=None, available=None))


def test_leave_follows_other_programs_and_counts_own_bytes_as_had():
    budget = resolve_budget("leave 6GiB", pool(total=32 * GIB, available=20 * GIB, allocated=2 * GIB))

    assert budget.follows_others
    assert budget.bytes == 16 * GIB


def test_leaving_more_than_there_is_names_what_there_is():
    with pytest.raises(BudgetError, match=r"'leave 30GiB' leaves nothing to train with: 20\.00 GiB is available"):
        resolve_budget("leave 30GiB", pool(total=32 * GIB, available=20 * GIB))


@pytest.mark.parametrize(
    "spec", ["", "lots", "28 apples", "-4GiB", "0GiB", "leave", "leave it", "50 %%", True, None, 4.5]
)
def test_text_that_is_no_budget_is_refused_with_examples(spec):
    with pytest.raises(BudgetError, match=r"28GiB, 60% \(of the pool\) or leave 6GiB"):
        resolve_budget(spec, pool(total=32 * GIB, available=20 * GIB))


@pytest.mark.parametrize("spec", ["28GiB", " 28 GiB ", "28672MiB", 28 * GIB])
def test_an_amount_may_be_written_in_several_ways(spec):
    assert resolve_budget(spec, pool(total=32 * GIB, available=20 * GIB)).bytes == 28 * GIB


@pytest.mark.parametrize("spec", [28, "28"])
def test_a_forgotten_unit_is_noticed(spec):
    with pytest.raises(BudgetError, match="is 28 bytes; was a unit forgotten"):
        resolve_budget(spec, pool(total=32 * GIB, available=20 * GIB))


@pytest.mark.parametrize("spec", ["0%", "101%"])
def test_a_share_outside_the_pool_is_refused(spec):
    with pytest.raises(BudgetError, match="more than 0% and at most 100%"):
        resolve_budget(spec, pool(total=32 * GIB, available=20 * GIB))


def test_the_reserve_of_a_unified_pool_is_a_tenth_and_at_least_four_gib():
    assert unified_reserve(16 * GIB) == 4 * GIB
    assert unified_reserve(100 * GIB) == 10 * GIB


def test_auto_on_a_machine_with_three_gib_to_be_had_gives_half_and_says_why():
    budget = resolve_budget("auto", pool(total=8 * GIB, available=3 * GIB))

    assert budget.bytes == 1.5 * GIB
    assert "the usual reserve is more than half of it" in budget.reason


def test_auto_on_a_full_machine_is_refused():
    with pytest.raises(BudgetError, match="nothing is available"):
        resolve_budget("auto", pool(total=8 * GIB, available=0))


def test_auto_on_gb10_leaves_a_tenth_of_its_one_pool(machine):
    reading = read(sources=machine("gb10"))

    total = reading.total.bytes or 0

    assert resolve_budget("auto", reading).bytes == total - unified_reserve(total)


def test_auto_on_a_discrete_card_leaves_five_percent(machine):
    """22 free, 0.5 cached, 1 live of 24: 23.5 - 1.2."""
    assert resolve_budget("auto", read(sources=machine("rtx4090"))).bytes == pytest.approx(22.3 * GIB, abs=2)


def test_auto_on_an_eight_gib_mac_takes_what_the_host_has_not_what_metal_allows(machine):
    budget = resolve_budget("auto", read(sources=machine("m1")))

    assert budget.bytes == pytest.approx(3.5 * GIB, abs=16384)
    assert "memory available now" in budget.reason


def test_auto_on_an_idle_mac_keeps_within_metals_working_set(machine):
    reading = pool(total=int(11.84 * GIB), available=int(11.8 * GIB), backend="mps", host=24 * GIB)
    budget = resolve_budget("auto", reading)

    assert budget.bytes == int(0.95 * int(11.84 * GIB))
    assert "95 % of Metal's recommended working set" in budget.reason


def test_auto_on_an_idle_eight_gib_mac_leaves_the_system_four():
    assert resolve_budget("auto", pool(total=6 * GIB, available=6 * GIB, backend="mps", host=8 * GIB)).bytes == 4 * GIB


def test_the_fixed_tiers_are_read_from_the_shipped_configuration():
    assert fixed_tiers() == {
        "debug": 4 * GIB,
        "small": 8 * GIB,
        "medium": 16 * GIB,
        "large": 28 * GIB,
        "optimal": 32 * GIB,
    }


def test_processes_on_one_pool_get_a_part_of_an_amount_each():
    budget = divide_budget(
        resolve_budget("8GiB", pool(total=16 * GIB, available=GIB)), pool(total=16 * GIB, available=GIB), sharers=4
    )

    assert (budget.bytes, budget.sharers) == (2 * GIB, 4)
    assert budget.reason.startswith("one part of 4, for as many processes on the same memory: as written")


def test_processes_on_one_pool_share_what_can_be_had_besides_what_each_holds():
    now = pool(total=64 * GIB, available=20 * GIB, allocated=2 * GIB)
    whole = resolve_budget("leave 6GiB", now)
    part = divide_budget(whole, now, sharers=2)

    assert whole.bytes == 16 * GIB
    assert part.bytes == 2 * GIB + 7 * GIB
    assert follow_budget(part, now).bytes == part.bytes


def test_one_process_has_all_of_its_budget():
    now = pool(total=16 * GIB, available=9 * GIB)
    budget = resolve_budget("8GiB", now)

    assert divide_budget(budget, now, sharers=1) is budget


@given(pools(), st.integers(MIB, 1024 * GIB))
def test_up_to_is_the_amount_within_the_pool_and_at_most_what_auto_gives_beyond_it(reading, amount):
    budget = resolve_budget(f"up to {amount}", reading)

    if amount <= reading.total.bytes:
        assert budget.bytes == amount
    else:
        assert budget.bytes == min(amount, resolve_budget("auto", reading).bytes)
        assert "is less than" in budget.reason
    assert budget.spec == f"up to {amount}"


def test_a_stated_amount_above_the_pool_is_still_an_error():
    with pytest.raises(BudgetError, match="above the pool"):
        resolve_budget("28GiB", pool(total=22 * GIB, available=20 * GIB))


def test_two_processes_share_an_amount_up_to_a_limit_evenly():
    reading = pool(total=64 * GIB, available=60 * GIB)
    assert divide_budget(resolve_budget("up to 28GiB", reading), reading, sharers=2).bytes == 14 * GIB
