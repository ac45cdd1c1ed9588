"""Thrashing is reported for slow steps with memory traffic, never for one of the two alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.hardware import ThrashDetector

MIB, GIB = 2**20, 2**30
SECONDS = st.floats(0.001, 1000)


class Run:
    """A detector whose clock is moved by hand; between batches time passes that must not count."""

    def __init__(self):
        self.now = 0.0
        self.detector = ThrashDetector(clock=lambda: self.now)

    def step(self, seconds, *, kind=0, traffic=None, gap=None, room=10 * GIB):
        self.now += 500  # validation, a checkpoint, the wait for data
        self.detector.begin()
        self.now += seconds
        return self.detector.end(kind, traffic=traffic, gap=gap, room=room)

    def steps(self, *seconds, **facts):
        return [self.step(one, **facts) for one in seconds]


def test_slow_steps_while_swap_is_busy_are_thrashing():
    run = Run()
    run.steps(*[2.0] * 10, traffic=0.0)
    found = run.steps(226.0, 226.0, 226.0, traffic=40.0 * MIB)

    assert found[:2] == [None, None]
    assert (round(found[2].seconds), found[2].usual_seconds) == (226, 2.0)
    assert found[2].reason == (
        "thrashing: steps take 3 min 46 s that took 2 s, while 40.00 MiB a second go to swap or come back"
    )


def test_slow_steps_while_the_driver_holds_ever_more_are_thrashing():
    """72 GiB held by the driver against 6.7 GiB of tensors.

    Throughput falls to a twelfth. A report from a Mac gave these figures.
    """
    run = Run()
    run.steps(*[1.0] * 8, gap=2 * GIB, room=50 * GIB)
    found = run.steps(12.0, 12.0, 12.0, gap=65 * GIB, room=50 * GIB)

    assert found[2].gap_bytes == 65 * GIB
    assert found[2].traffic_bytes_per_s is None


def test_the_advice_names_what_helps_on_the_backend():
    run = Run()
    run.steps(*[1.0] * 8, gap=0)
    thrash = run.steps(9.0, 9.0, 9.0, gap=9 * GIB)[-1]

    assert "PYTORCH_MPS_LOW_WATERMARK_RATIO" in thrash.advice("mps")
    assert "expandable_segments" in thrash.advice("cuda")
    for backend in ("mps", "cuda", "cpu"):
        assert "pad or bucket" in thrash.advice(backend)
        assert "memory.budget" in thrash.advice(backend)


def test_a_quick_step_ends_it():
    run = Run()
    run.steps(*[1.0] * 8, traffic=0.0)
    slow = run.steps(9.0, 9.0, 9.0, 9.0, traffic=99.0 * MIB)
    after = run.steps(1.0, 9.0, 9.0, traffic=99.0 * MIB)

    assert [one is not None for one in slow] == [False, False, True, True]
    assert after == [None, None, None]


@pytest.mark.parametrize("seconds", [9.0, 900.0])
def test_slow_steps_without_traffic_or_gap_are_only_slow(seconds):
    run = Run()
    run.steps(*[1.0] * 8, traffic=0.0, gap=GIB)

    assert set(run.steps(*[seconds] * 20, traffic=1.0 * MIB, gap=2 * GIB)) == {None}


def test_traffic_that_was_there_from_the_start_is_no_sign():
    run = Run()
    run.steps(*[1.0] * 8, traffic=30.0 * MIB)

    assert set(run.steps(*[9.0] * 5, traffic=50.0 * MIB)) == {None}


def test_steps_of_another_kind_are_not_compared():
    run = Run()
    run.steps(*[1.0] * 20, kind="short", traffic=0.0)

    assert set(run.steps(*[9.0] * 7, kind="long", traffic=99.0 * MIB)) == {None}


def test_slow_steps_count_over_kinds_that_alternate():
    run = Run()
    for _ in range(8):
        run.step(1.0, kind="short", traffic=0.0)
        run.step(4.0, kind="long", traffic=0.0)
    found = [run.step(took, kind=kind, traffic=99.0 * MIB) for took, kind in ((9.0, "short"), (36.0, "long")) * 2]

    assert [one is not None for one in found] == [False, False, True, True]


def test_a_slow_start_does_not_hide_what_follows():
    """The first steps compile; a later block of eight that is quicker becomes the measure."""
    run = Run()
    run.steps(*[30.0] * 8, *[1.0] * 8, traffic=0.0)

    assert run.steps(9.0, 9.0, 9.0, traffic=99.0 * MIB)[-1].usual_seconds == 1.0


def test_an_end_without_a_beginning_says_nothing():
    assert Run().detector.end(0, traffic=None, gap=None, room=None) is None


@given(base=SECONDS, noise=st.lists(st.floats(1.0, 2.99), min_size=12, max_size=80), kinds=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_noise_on_constant_steps_is_never_thrashing_whatever_memory_does(base, noise, kinds):
    run = Run()
    for index, factor in enumerate(noise):
        late = index > 8
        found = run.step(base * factor, kind=index % kinds, traffic=1e9 if late else 0.0, gap=9 * GIB if late else 0)
        assert found is None


@given(st.lists(st.booleans(), min_size=20, max_size=80))
@settings(max_examples=60, deadline=None)
def test_outliers_are_never_thrashing_if_no_three_come_in_a_row(slow):
    run = Run()
    run.steps(*[1.0] * 8, traffic=0.0)
    for index, is_slow in enumerate(slow):
        spared = index >= 2 and slow[index - 1] and slow[index - 2]
        slow[index] = is_slow and not spared
        assert run.step(100.0 if slow[index] else 1.0, traffic=1e9) is None
