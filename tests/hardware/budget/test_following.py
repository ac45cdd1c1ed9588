"""A `leave` budget follows memory that other programs take and free, and nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.hardware import Budget, BudgetFollower, Figure, Reading, read, resolve_budget

GIB = 2**30


def with_available(reading, count):
    return replace(reading, available=Figure(int(count * GIB), "MemAvailable"), allocated=Figure(2 * GIB, "VmRSS"))


class Following:
    """A follower of `leave 6GiB` on a machine of 32 GiB, 2 GiB of it this process's own."""

    def __init__(self, machine, available, spec="leave 6GiB"):
        self.now = 0.0
        self.reading = read("cpu", sources=machine("rtx4090"))
        self.start = resolve_budget(spec, with_available(self.reading, available))
        self.follower = BudgetFollower(self.start, clock=lambda: self.now)

    def read(self, available):
        self.now += 2.0
        return self.follower.follow(with_available(self.reading, available))

    @property
    def gib(self):
        return self.follower.budget.bytes / GIB


def test_what_others_take_the_budget_loses_and_gets_back(machine):
    run = Following(machine, 24)
    fell = [run.read(14), run.read(14)]
    low = run.gib
    rose = [run.read(24), run.read(24)]

    assert (run.start.bytes / GIB, low, run.gib) == (20, 10, 20)
    assert (fell, rose) == ([False, True], [False, True])
    assert run.follower.budget.follows_others
    assert "read again while running" in run.follower.budget.reason


def test_of_two_readings_the_nearer_counts(machine):
    run = Following(machine, 24)
    run.read(8)
    run.read(16)

    assert run.gib == 12


@pytest.mark.parametrize("readings", [(23.2, 23.2), (24.8, 24.8), (14, 24), (24, 34), (14, 34)])
def test_less_than_a_twentieth_and_what_only_flickers_changes_nothing(machine, readings):
    run = Following(machine, 24)

    assert [run.read(available) for available in readings] == [False, False]
    assert run.follower.budget is run.start


def test_a_machine_that_others_fill_leaves_the_least_there_is_instead_of_an_error(machine):
    run = Following(machine, 24)
    run.read(1)
    run.read(1)

    assert run.follower.budget.bytes == 2**20


def test_own_growth_is_not_taken_for_others(machine):
    run = Following(machine, 24)
    grown = replace(run.reading, available=Figure(14 * GIB, "MemAvailable"), allocated=Figure(12 * GIB, "VmRSS"))

    assert not run.follower.follow(grown)
    assert not run.follower.follow(grown)


def test_an_unknown_reading_changes_nothing(machine):
    run = Following(machine, 24)
    unknown = replace(run.reading, available=Figure(None, "unknown"))

    assert [run.follower.follow(unknown) for _ in range(3)] == [False] * 3


def test_it_is_read_every_two_seconds_only_and_only_if_it_follows(machine):
    run, fixed = Following(machine, 24), Following(machine, 24, spec="8GiB")
    at_once = run.follower.due
    run.now = fixed.now = 2.0
    after = run.follower.due
    run.follower.follow(with_available(run.reading, 24))

    assert (at_once, after, run.follower.due, fixed.follower.due) == (False, True, False, False)


@given(st.lists(st.floats(0, 60), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_budget_is_always_one_that_a_reading_gave_or_nearer_than_the_newest(readings):
    unknown, start = Figure(None, "unknown"), 20 * GIB
    reading = Reading(
        device="cpu",
        backend="cpu",
        name="",
        pool="unified",
        total=Figure(64 * GIB, "MemTotal"),
        available=unknown,
        allocated=unknown,
        reserved=unknown,
        peak=unknown,
    )
    budget = Budget(bytes=start, spec="leave 6GiB", reason="", follows_others=True)
    follower = BudgetFollower(budget, clock=lambda: 0.0)
    given_bytes = {start}
    for available in readings:
        now = max(min(int(available * GIB) + 2 * GIB, 64 * GIB) - 6 * GIB, 2**20)
        given_bytes.add(now)
        was = follower.budget.bytes
        follower.follow(with_available(reading, available))

        assert follower.budget.bytes in given_bytes
        assert abs(follower.budget.bytes - was) <= abs(now - was)
