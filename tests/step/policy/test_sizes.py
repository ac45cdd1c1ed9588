"""The micro-batch size follows evidence.

A failed size is not run again, an untried one is tried, and a size reduced by pressure returns.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_unified.errors import ConfigurationError
from lightning_unified.step.recovery.sizes import MicroBatchSize
from lightning_unified.step.split import BatchShape


def shape(rows, elements=1):
    return BatchShape(rows=rows, elements=elements)


def run(sizes, batch, *, most, room=None):
    """Run one batch on a machine that holds `most` entries at once; return the sizes tried."""
    tried = []
    while True:
        tried.append(sizes.micro_batch_size(batch))
        if tried[-1] * batch.elements <= most:
            sizes.worked(batch)
            return tried
        if not sizes.failed(batch, room_bytes=room):
            return tried


def test_what_failed_is_halved_until_it_fits():
    sizes = MicroBatchSize("auto")

    assert run(sizes, shape(32), most=5) == [32, 16, 8, 4]
    assert sizes.micro_batches(shape(32)) == [4] * 8


def test_after_enough_batches_one_micro_batch_fewer_is_tried_and_used_if_it_fits():
    sizes = MicroBatchSize("auto")
    run(sizes, shape(32), most=7)
    tried = {size for _ in range(400) for size in run(sizes, shape(32), most=7)}

    assert tried == {4, 5, 6, 7}  # 8 micro-batches, then 7, 6, 5; 4 would be of 8 rows, which failed
    assert sizes.micro_batch_size(shape(32)) == 7


def test_a_larger_size_that_fails_waits_twice_as_long_for_its_next_try():
    sizes = MicroBatchSize("auto")
    run(sizes, shape(32), most=5)
    tried = [size for _ in range(1000) for size in run(sizes, shape(32), most=5)]

    assert tried.count(6) == 1
    assert set(tried) == {4, 5, 6}


def test_longer_rows_learn_from_shorter_ones_and_not_the_other_way_round():
    sizes = MicroBatchSize("auto")
    run(sizes, shape(16, elements=100), most=800)

    assert sizes.micro_batch_size(shape(16, elements=100)) == 8
    assert sizes.micro_batch_size(shape(16, elements=200)) == 8  # what failed for shorter rows fails for these
    assert sizes.micro_batch_size(shape(16, elements=50)) == 16  # not known to fail


def test_a_size_that_fits_long_rows_is_used_for_shorter_ones_without_a_trial():
    sizes = MicroBatchSize("auto")
    run(sizes, shape(15, elements=100), most=1500)
    run(sizes, shape(16, elements=90), most=1400)

    assert sizes.micro_batch_size(shape(60, elements=90)) == 15
    assert sizes.micro_batch_size(shape(60, elements=100)) == 15
    assert sizes.micro_batch_size(shape(60, elements=110)) == 8


def test_more_memory_is_new_evidence_and_less_than_a_quarter_more_is_not():
    sizes = MicroBatchSize("auto")
    run(sizes, shape(16), most=8, room=1000)

    assert not sizes.evidence.forgive(1249)
    assert not sizes.evidence.forgive(None)
    assert sizes.micro_batch_size(shape(16)) == 8
    assert sizes.evidence.forgive(1250)
    assert sizes.micro_batch_size(shape(16)) == 16


def test_pressure_halves_and_gives_back_step_by_step():
    sizes = MicroBatchSize("auto")
    assert sizes.press(shape(16))
    assert sizes.press(shape(16))
    assert sizes.micro_batch_size(shape(16)) == 4

    assert sizes.relax(shape(16))
    assert sizes.micro_batch_size(shape(16)) == 8
    assert sizes.relax(shape(16))
    assert sizes.micro_batch_size(shape(16)) == 16
    assert not sizes.relax(shape(16))


def test_a_size_that_was_asked_for_is_never_exceeded():
    sizes = MicroBatchSize(6)
    sizes.press(shape(16))
    while sizes.relax(shape(16)):
        assert sizes.micro_batch_size(shape(16)) <= 6

    assert sizes.micro_batch_size(shape(16)) == 6
    assert sizes.micro_batch_size(shape(4)) == 4


def test_the_smallest_unit_cannot_be_halved():
    sizes = MicroBatchSize("auto")
    sizes.keep_together(4, whose="Module")

    assert sizes.failed(shape(8), room_bytes=None)
    assert sizes.micro_batch_size(shape(8)) == 4
    assert not sizes.failed(shape(8), room_bytes=None)
    assert not sizes.press(shape(8))


def test_a_unit_above_the_size_asked_for_is_refused():
    with pytest.raises(ConfigurationError, match="is less than the 4 rows"):
        MicroBatchSize(2).keep_together(4, whose="Module")


batches = st.builds(shape, st.integers(1, 40), st.integers(1, 6))
machines = st.lists(st.tuples(batches, st.integers(1, 120)), min_size=1, max_size=60)


@given(machines, st.integers(1, 3), st.sampled_from(["auto", 3, 7, 20]))
def test_a_proven_bad_size_is_never_run_without_new_evidence(history, unit, start):
    """No failed size is run again, for rows as long or shorter, before it is forgiven.

    This holds for any behaviour of memory.
    """
    sizes = MicroBatchSize(start)
    sizes.keep_together(unit, whose="Module")
    failed = []
    for batch, most in history:
        for _ in range(8):
            rows = sizes.micro_batch_size(batch)
            bad = min((rows for elements, rows in failed if elements <= batch.elements), default=1000)
            assert rows < bad or rows == unit or bad <= unit
            if rows * batch.elements <= most:
                sizes.worked(batch)
                break
            failed.append((batch.elements, rows))
            if not sizes.failed(batch, room_bytes=None):
                break


@given(machines, st.integers(1, 3))
def test_another_run_goes_on_with_the_same_sizes(history, unit):
    sizes, other = MicroBatchSize("auto"), MicroBatchSize("auto")
    for either in (sizes, other):
        either.keep_together(unit, whose="Module")
    for batch, most in history:
        run(sizes, batch, most=most)
    other.load_state_dict(sizes.state_dict())

    assert all(other.micro_batch_size(batch) == sizes.micro_batch_size(batch) for batch, _ in history)
    for batch, most in history:
        assert run(sizes, batch, most=most) == run(other, batch, most=most)


@pytest.mark.parametrize(("rows", "parts"), [(8, [2, 2, 2, 2]), (5, [3, 2]), (3, [3]), (1, [1])])
def test_no_micro_batch_has_fewer_rows_than_its_layers_need(rows, parts):
    sizes = MicroBatchSize(2)
    sizes.keep_together(1, least=2, whose="Module")

    assert sizes.micro_batches(shape(rows)) == parts


def test_a_size_that_layers_need_is_the_smallest():
    sizes = MicroBatchSize("auto")
    sizes.keep_together(1, least=2, whose="Module")

    assert [sizes.failed(shape(8), room_bytes=None) for _ in range(3)] == [True, True, False]
    assert sizes.micro_batch_size(shape(8)) == 2


def test_a_step_that_needs_less_than_before_is_tried_whole_again():
    sizes = MicroBatchSize("auto")
    run(sizes, shape(32), most=1)
    sizes.evidence.start_over()

    assert run(sizes, shape(32), most=8) == [32, 16, 8]
