"""Caches are cleared if much is held unused, within their share of the time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.hardware import CachePolicy, Figure, ShapeWatch, idle_bytes, read

GIB = 2**30


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def policy():
    clock = Clock()
    return clock, CachePolicy(clock=clock)


def clear(clock, caches, seconds):
    clock.now += seconds
    caches.cleared(seconds)


def step(clock, caches, seconds):
    clock.now += seconds
    caches.stepped(seconds)


def due(caches, *, idle=5.0, pressed=False):
    return caches.due(idle=int(idle * GIB), budget=10 * GIB, pressed=pressed)


@pytest.mark.parametrize(
    ("idle", "pressed", "clears"), [(2.4, False, False), (2.6, False, True), (0.4, True, False), (0.6, True, True)]
)
def test_unused_caches_above_a_share_of_the_budget_are_cleared(idle, pressed, clears):
    assert due(policy()[1], idle=idle, pressed=pressed) == clears


def test_what_is_unknown_is_not_cleared():
    assert not policy()[1].due(idle=None, budget=GIB, pressed=True)


def test_a_clear_waits_until_the_last_ones_cost_is_a_hundredth_of_the_time():
    clock, caches = policy()
    for _ in range(20):
        step(clock, caches, 1.0)
    clear(clock, caches, 0.2)
    step(clock, caches, 1.3)  # 0.3 s more than steps take: blocks and graphs are made anew
    early = due(caches)
    clock.now = 20.2 + 49.0  # a hundredth of 50 s is the 0.5 s that it cost
    before = due(caches)
    clock.now = 20.2 + 51.0

    assert (early, before, due(caches)) == (False, False, True)


def test_pressure_shortens_the_wait_tenfold():
    clock, caches = policy()
    step(clock, caches, 1.0)
    clear(clock, caches, 0.5)
    step(clock, caches, 1.0)
    clock.now += 5.0

    assert (due(caches), due(caches, pressed=True)) == (False, True)


def test_nothing_is_cleared_before_a_step_has_shown_what_the_last_clear_cost():
    clock, caches = policy()
    clear(clock, caches, 0.0)
    clock.now += 100.0

    assert not due(caches)


@given(
    costs=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=40),
    steps=st.floats(0.01, 10),
    pressed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_all_clears_but_the_last_cost_at_most_their_share_of_the_run(costs, steps, pressed):
    clock, caches = policy()
    for _ in range(3):
        step(clock, caches, steps)
    spent, last = 0.0, 0.0
    for took, more in costs:
        for _ in range(2000):
            if due(caches, pressed=pressed):
                break
            step(clock, caches, steps)
        else:
            break
        spent, last = spent + last, took + more
        clear(clock, caches, took)
        step(clock, caches, steps + more)

        assert spent <= (0.10 if pressed else 0.01) * clock.now + 1e-6


def test_what_lies_idle_is_what_is_held_beyond_the_most_that_was_needed(machine):
    reading = read(sources=machine("m4_pro"))  # driver 4, live 2, peak 2 GiB
    later = replace(reading, peak=Figure(3 * GIB, "counted"))
    uncounted = replace(reading, peak=Figure(None, "unknown"))

    assert idle_bytes(reading) == 2 * GIB
    assert idle_bytes(later) == GIB
    assert idle_bytes(uncounted, seen=int(3.5 * GIB)) == GIB // 2


def test_a_cpu_holds_nothing_idle(machine):
    assert idle_bytes(read("cpu", sources=machine("bare"))) is None


def look(watch, *sizes_and_beyond):
    return [watch.look((size,), beyond=beyond * GIB, budget=10 * GIB) for size, beyond in sizes_and_beyond]


def test_growth_with_ever_other_shapes_is_said_once():
    watch = ShapeWatch()
    said = look(watch, (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 9))

    assert [text is not None for text in said] == [False, False, False, True, False, False]
    assert "have grown by 3.00 GiB" in said[3]
    assert "buckets" in said[3]


@pytest.mark.parametrize(
    "looks",
    [[(1, held) for held in range(9)], [(size, 3) for size in range(9)], [(size % 2, size) for size in range(9)]],
    ids=["one shape", "no growth", "a short last batch"],
)
def test_neither_growth_nor_shapes_alone_are_a_reason(looks):
    assert set(look(ShapeWatch(), *looks)) == {None}


def test_where_nothing_is_counted_nothing_is_said():
    watch = ShapeWatch()

    assert {watch.look((size,), beyond=None, budget=GIB) for size in range(9)} == {None}
