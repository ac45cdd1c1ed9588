"""Whether a step fits within a limit on reserved bytes."""

import pytest

from lightning_unified.cost_model.memory.limit import fits_within
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.units import MIB


@pytest.fixture
def step():
    """At most 190 MiB are live.

    Within 190 MiB the last 40 fit. Within 200 MiB nothing is released in time, and they do not.
    """
    events = [Take(0, 40 * MIB, "weights"), Work("mm", "forward")]
    for storage, size in ((1, 20), (2, 60)):
        events += [Take(storage, size * MIB, "activations"), Give(storage)]
    events += [Take(storage, size * MIB, "activations") for storage, size in ((3, 80), (4, 40), (5, 30))]
    return Trace(events=(*events, Give(3), Give(4), Give(5)), rows=1, num_micro_batches=1, backend="cuda")


def test_a_step_fits_within_what_it_takes_and_not_within_less_than_lives(step):
    found = allocator_peak(step)

    assert (found.allocated, found.reserved) == (190 * MIB, 230 * MIB)
    assert fits_within(step, found.reserved)
    assert not fits_within(step, found.allocated - MIB)


def test_an_allocator_at_its_limit_gives_back_what_is_free(step):
    assert fits_within(step, 220 * MIB)


def test_a_step_that_meets_its_limit_needs_two_percent_to_spare(step):
    assert not fits_within(step, 210 * MIB)
    assert not fits_within(step, 214 * MIB)
    assert fits_within(step, 217 * MIB), "within 210 MiB it goes through"


@pytest.mark.parametrize(("replayed", "short", "enough"), [((), 202, 207), (("net",), 207, 211)])
def test_expandable_segments_need_room_and_recorded_steps_more(replayed, short, enough):
    events = (Take(0, 40 * MIB, "weights"), Work("mm", "forward"), Take(1, 160 * MIB, "activations"), Give(1))
    step = Trace(events=events, rows=1, num_micro_batches=1, backend="cuda", replayed=replayed)
    settings = AllocatorSettings(expandable=True)

    assert not fits_within(step, short * MIB, settings=settings)
    assert fits_within(step, enough * MIB, settings=settings)


def test_what_goes_through_within_a_limit_and_not_within_a_larger_one_does_not_fit(step):
    assert not fits_within(step, 190 * MIB)


def test_more_memory_never_makes_a_step_not_fit(step):
    found = [fits_within(step, limit * MIB) for limit in range(180, 240)]

    assert found == sorted(found)
    assert any(found)
    assert not all(found)


def test_nothing_fits_within_nothing(step):
    assert not fits_within(step, 0)


def test_memory_of_single_mappings_is_available_again_once_freed():
    events = [Take(0, MIB, "weights"), Work("mm", "forward")]
    events += [Take(1, 100 * 1024, "activations"), Take(2, 64 * 1024, "activations"), Give(1)]
    events += [Take(3, 120 * 1024, "activations"), Give(2), Give(3)]
    step = Trace(events=tuple(events), rows=1, num_micro_batches=1, backend="cpu")

    assert fits_within(step, MIB + 200 * 1024, settings=AllocatorSettings(mmap_threshold=64 * 1024))
    assert not fits_within(step, MIB + 200 * 1024)


@pytest.mark.parametrize(("version", "fits"), [((2, 13), False), ((2, 14), True)])
def test_free_neighbours_on_a_mac_fit_a_larger_block_since_torch_2_14(version, fits):
    events = [Take(0, MIB, "weights"), Work("mm", "forward")]
    events += [Take(number, 7 * MIB, "activations") for number in range(1, 5)]
    events += [Give(1), Give(2), Take(5, 9 * MIB, "activations"), Take(6, 5 * MIB, "activations")]
    step = Trace(events=tuple(events), rows=1, num_micro_batches=1, backend="mps")

    assert fits_within(step, 49 * MIB, settings=AllocatorSettings(torch_version=version)) is fits
