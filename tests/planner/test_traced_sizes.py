"""Sizes are traced when their bytes decide something, and not when others tell them."""

import pytest

from lightning_unified.cost_model.memory.reserve import reserved_bytes
from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.search import Option, Taken, search
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work
from lightning_unified.planner.search.traced_sizes import TracedSizes

MIB = 1 << 20
ROWS = 64


def sizes_of(*, aligned):
    """A step of 10 MiB and 1 MiB a row, with the sizes at which it was traced.

    Its operations are the same at every size, or not.
    """
    asked = []

    def trace_step(rows, num_micro_batches, later_rows):
        asked.append((rows, num_micro_batches))
        op = "aten.mm.default" if aligned else f"aten.mm.of_{rows}"
        events = [Work("", "setup"), Take(0, 10 * MIB, "weights")]
        for part in range(1, num_micro_batches + 1):
            events += [
                Work(op, "forward", flops=rows),
                Take(part, (rows if part == 1 else later_rows) * MIB, "activations"),
                Give(part),
            ]
        return Trace(events=tuple(events), rows=rows, num_micro_batches=num_micro_batches, backend="cpu")

    return TracedSizes(trace_step, rows=ROWS, unit=1, row_bytes=0, workspaces=False), asked


def taken(trace, more=0):
    reserved = reserved_bytes(trace)
    return Taken(peak_bytes=reserved, reserved_bytes=reserved + more)


def found(sizes, budget, taken=taken):
    rates = Rates(name="", flops={"float32": 1e9}, bandwidth=1e9, launch=1e-5, kernel=1e-6, part=0.0, sources={})
    return search([Option(traces=sizes)], budget_bytes=budget, taken=taken, rows=ROWS, rates=rates).best


@pytest.mark.parametrize("aligned", [True, False])
def test_what_cannot_fit_by_what_the_whole_batch_takes_is_not_traced(aligned):
    sizes, asked = sizes_of(aligned=aligned)

    assert found(sizes, 25 * MIB).micro_batch_size == 13
    assert asked == [(64, 1), (13, 2)]


@pytest.mark.parametrize(("aligned", "lines"), [(True, [(2, 2), (4, 2)]), (False, [(2, 2), (4, 2), (13, 2)])])
def test_lines_are_laid_when_several_sizes_did_not_fit(aligned, lines):
    sizes, asked = sizes_of(aligned=aligned)

    def uneven(trace):  # an allocator's own way
        return taken(trace, more=(trace.rows in (32, 22, 16)) * 100 * MIB)

    assert found(sizes, 45 * MIB, taken=uneven).micro_batch_size == 13
    assert asked == [(64, 1), (32, 2), (22, 2), (16, 2), *lines]


def test_what_a_size_takes_at_least_is_never_more_than_it_takes():
    sizes, _ = sizes_of(aligned=False)
    sizes.peak_bytes(4, num_micro_batches=2)

    for rows in (3, 4, 8, 32):
        least = sizes.peak_bytes(rows, num_micro_batches=2)
        sizes.at(rows, num_micro_batches=2)
        assert least <= sizes.peak_bytes(rows, num_micro_batches=2)
