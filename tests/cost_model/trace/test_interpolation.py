"""A few traced sizes determine a step of any size, event by event."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.trace.interpolation import Interpolation, MisalignedError
from lightning_unified.cost_model.trace.timeline import timeline_of
from lightning_unified.cost_model.trace.trace import Give, Passes, Read, Take, Trace, Work

NAMES = ("weights", "activations", "temporaries")


def happened(trace):
    """The events of a trace, in an order that does not depend on numbering.

    Storages that end together may end in any order.
    """
    timeline = timeline_of(trace)
    return timeline.slots, timeline.births.tolist(), timeline.ends.tolist()


def trace_of(events, *, rows, **fields):
    return Trace(events=tuple(events), rows=rows, backend="cuda", **fields)


@st.composite
def timelines(draw):
    """A random step: storages of `fixed + rows * each` bytes.

    Each storage has a start and, if it ends, an end.
    """
    count = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**7)), min_size=count, max_size=count))
    lives = draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.booleans()), min_size=count, max_size=count)
    )

    def at(rows):
        events = []
        for moment in range(42):
            events += [Give(n) for n, (begin, lasts, ends) in enumerate(lives) if ends and begin + lasts == moment]
            events.append(Work(f"op{moment}", "forward", "net", rows * moment, moment))
            events += [
                Take(n, sizes[n][0] + rows * sizes[n][1], NAMES[n % 3])
                for n, (begin, _, _) in enumerate(lives)
                if begin == moment
            ]
        return trace_of(events, rows=rows)

    return at


@settings(max_examples=40, deadline=None)
@given(timelines(), st.integers(1, 10**4))
def test_a_step_of_any_rows_is_computed_from_two(step, rows):
    steps = Interpolation([step(2), step(4)])
    for asked in (2, 4, rows):
        assert happened(steps.at(asked)) == happened(step(asked))


@settings(max_examples=40, deadline=None)
@given(timelines(), st.lists(st.integers(1, 10**4), min_size=2, max_size=2).map(sorted))
def test_more_rows_never_have_a_lower_peak(step, rows):
    steps = Interpolation([step(2), step(4)])
    assert peak(steps.at(rows[0])).bytes <= peak(steps.at(rows[1])).bytes


@pytest.mark.parametrize("length", [8, 16, 100, 4096])
def test_attention_that_is_materialised_is_quadratic_from_three_traces(made, length):
    steps = Interpolation([made(rows=2), made(rows=4), made(rows=2, length=32)])
    assert happened(steps.at(5, length=length)) == happened(made(rows=5, length=length))


def test_a_split_step_of_any_rows_is_computed_from_two_split_steps(made):
    at = Interpolation([made(rows=2, num_micro_batches=2), made(rows=4, num_micro_batches=2)]).at(5)
    assert happened(at) == happened(made(rows=5, num_micro_batches=2))
    assert at.notes[0].endswith("2 rows of 16, 4 rows of 16 in 2 micro-batches")


def test_similarities_of_all_pairs_of_rows_grow_with_their_square():
    def step(rows):
        return trace_of([Work("aten.mm.default", "forward"), Take(0, 4 * rows * rows, "logits")], rows=rows)

    assert peak(Interpolation([step(2), step(4)]).at(100), rounding=1).bytes == 40_000


def test_a_figure_that_kernels_round_up_is_near_at_every_size():
    def step(rows):
        return trace_of([Take(0, -(-(rows * 10_007) // 512) * 512, "activations")], rows=rows)

    steps = Interpolation([step(2), step(4), step(8)])
    assert peak(steps.at(1000), rounding=1).bytes == pytest.approx(10_007_000, rel=0.02)


def test_a_figure_on_no_line_is_refused_with_its_sizes():
    sizes = {2: 10**6, 4: 9 * 10**6, 6: 10**6, 8: 7 * 10**6, 10: 2 * 10**6}
    steps = [
        trace_of([Work("aten.odd.default", "forward", "net"), Take(0, size, "logits")], rows=r)
        for r, size in sizes.items()
    ]
    with pytest.raises(MisalignedError, match=r"logits are taken by aten.odd.default.*9000000 bytes at 4 rows"):
        Interpolation(steps)


def test_storages_are_known_by_their_order_not_by_their_numbers():
    steps = [trace_of([Take(rows * 100, rows, "logits"), Give(rows * 100)], rows=rows) for rows in (2, 4)]
    assert Interpolation(steps).at(3).events == (Take(0, 3, "logits"), Give(0))


def test_a_storage_that_ends_earlier_in_one_trace_lives_until_the_later_end():
    first = [Take(0, 8, "logits"), Give(0), Work("a", "forward"), Take(1, 8, "logits")]
    later = [Take(0, 16, "logits"), Work("a", "forward"), Take(1, 16, "logits"), Give(0)]
    steps = Interpolation([trace_of(first, rows=2), trace_of(later, rows=4)])
    assert peak(steps.at(2), rounding=1).bytes == 16


def test_traces_of_other_operations_are_refused_by_the_first_that_differs():
    def step(op, rows):
        return trace_of(
            [Work("aten.mm.default", "forward"), Work(op, "backward", "net.head"), Take(0, 8, "logits")], rows=rows
        )

    with pytest.raises(
        MisalignedError, match=r"event 2, aten.a runs in the backward of net.head with 2 rows, but aten.b .* with 4"
    ):
        Interpolation([step("aten.a", 2), step("aten.b", 4)])


def test_a_trace_that_is_longer_is_refused():
    steps = [trace_of([Take(n, 8, "logits") for n in range(rows)], rows=rows) for rows in (2, 4)]
    with pytest.raises(MisalignedError, match=r"the step has ended with 2 rows, but logits are taken with 4 rows"):
        Interpolation(steps)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("backend", "mps", "backend: cuda and mps"),
        ("options", {"precision": "bf16-mixed"}, "options"),
        ("num_micro_batches", 2, "micro-batches: 1 and 2"),
    ],
)
def test_traces_of_other_settings_are_refused(made, field, value, words):
    with pytest.raises(MisalignedError, match=f"differ in {words}"):
        Interpolation([made(rows=2), replace(made(rows=4), **{field: value})])


def test_one_row_is_no_size_to_fit_from(made):
    with pytest.raises(ValueError, match="one of the traces has 1 row"):
        Interpolation([made(rows=1), made(rows=2)])


def test_no_traces_are_refused():
    with pytest.raises(ValueError, match="no traces to fit"):
        Interpolation([])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rows": 8, "length": 32}, r"length=32 was requested.*length=16 only"),
        ({"rows": 0}, "rows=0; a micro-batch has at least 1"),
    ],
)
def test_a_size_that_the_traces_do_not_determine_is_refused(made, asked, words):
    with pytest.raises(ValueError, match=words):
        Interpolation([made(rows=2), made(rows=4)]).at(**asked)


def test_one_trace_gives_its_own_size_only(made):
    steps = Interpolation([made(rows=3)])
    assert happened(steps.at(3)) == happened(made(rows=3))
    with pytest.raises(ValueError, match="rows=4 was requested, but the step was traced at rows=3 only"):
        steps.at(4)


def test_what_was_made_up_in_any_trace_is_in_the_computed_one(made):
    read = Read("aten._local_scalar_dense.default", "net", "1", shapes=True)
    steps = Interpolation([made(rows=2), replace(made(rows=4), reads=(read,), notes=("seen",))])
    assert steps.at(9).confidence == "low"
    assert steps.at(9).notes == ("seen", "interpolated from the step traced at 2 rows of 16, 4 rows of 16")


def test_an_operation_that_stands_for_many_stands_for_more_at_larger_sizes():
    def step(rows):
        return trace_of([Passes("mm", "forward", "", 6 * rows, 40 * rows, launches=3 * rows, kernels=rows)], rows=rows)

    steps = Interpolation([step(2), step(4)])

    assert [steps.at(rows).events for rows in (2, 4, 10)] == [step(rows).events for rows in (2, 4, 10)]
