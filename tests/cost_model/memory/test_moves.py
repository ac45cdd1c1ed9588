"""Gradients that stay where they are: what a replay of a split step then takes and frees."""

from dataclasses import replace

import pytest

from lightning_unified.cost_model.memory.moves import Moves
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work
from lightning_unified.hardware.allocators.settings import AllocatorSettings

MIB = 2**20
SETTINGS = AllocatorSettings(expandable=True)
LAYERS = 4
ZERO_GRAD = tuple(Give(number) for number in range(1, LAYERS + 1))


def split_step(*, zeroing=ZERO_GRAD, late=()):
    """Two micro-batches of a network of four layers, whose gradients come where activations have been."""
    events = [Take(0, 80 * MIB, "weights"), Take(50, 300 * MIB, "optimizer state")]
    events += (Take(number, 20 * MIB, "gradients") for number in range(1, LAYERS + 1))
    for first, zeroes in ((10, zeroing), (30, late)):
        events += [Work("mm", "forward"), Take(first, 240 * MIB, "temporaries"), Give(first)]
        for layer in range(LAYERS):
            events += [Work("mm", "forward"), Take(first + 1 + layer, 60 * MIB, "activations")]
        events += zeroes
        for layer in reversed(range(LAYERS)):
            gradient = first + 11 + layer
            events += [Work("mm", "backward"), Take(gradient, 20 * MIB, "gradients" if first == 10 else "temporaries")]
            events += [Give(first + 1 + layer), *([] if first == 10 else [Work("add", "backward"), Give(gradient)])]
    events.append(Work("adam", "optimizer step"))
    return Trace(events=tuple(events), rows=2, num_micro_batches=2, backend="cuda")


def test_new_gradients_are_freed_before_the_next_operation():
    moves = Moves.of(split_step()).in_place
    order = [(storage, taken is not None) for _, storage, taken in moves if storage in (1, 23, 24)]

    assert order == [(24, True), (24, False), (23, True), (23, False)]


@pytest.mark.parametrize(
    "trace",
    [
        replace(split_step(), num_micro_batches=1),
        replace(split_step(), replayed=("net",)),
        split_step(zeroing=(), late=ZERO_GRAD),
        split_step(zeroing=()),
    ],
    ids=["whole", "recorded", "zeroed late", "never zeroed"],
)
def test_gradients_of_other_steps_are_new(trace):
    moves = Moves.of(trace)

    assert moves.in_place is moves.moves


def test_gradients_in_place_reserve_less():
    found = allocator_peak(split_step(), settings=SETTINGS)
    scattered = allocator_peak(replace(split_step(), num_micro_batches=1), settings=SETTINGS)

    assert found.allocated == scattered.allocated
    assert found.reserved < scattered.reserved


def test_segments_that_do_not_expand_are_replayed_as_before():
    assert allocator_peak(split_step()) == allocator_peak(replace(split_step(), num_micro_batches=1))
