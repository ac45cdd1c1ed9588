"""Rows of a loss, part by part."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_unified.nn.cross_entropy.row_parts import parts, repeated_once


def counted(count, rows, *, whole_chunks):
    """Return each part's rows, and how often it counts."""
    times = [1.0]

    @contextlib.contextmanager
    def repeat(number):
        times.append(number)
        yield
        times.pop()

    with repeated_once(repeat, whole_chunks=whole_chunks), FakeTensorMode():
        return [(len(range(count)[part]), times[-1]) for part in parts(torch.empty(count), rows)]


@pytest.mark.parametrize(("count", "rows"), [(0, 4), (3, 4), (4, 4), (5, 4), (8, 4), (9, 4), (100, 4)])
def test_the_parts_of_a_run_are_all_rows_once(count, rows):
    assert [row for part in parts(torch.empty(count), rows) for row in range(count)[part]] == list(range(count))


def test_parts_with_values_stand_for_no_others():
    with repeated_once(lambda _: contextlib.nullcontext(), whole_chunks=False):
        assert len(list(parts(torch.empty(12), 4))) == 3


@pytest.mark.parametrize("count", [1, 4, 5, 7, 8, 9, 12, 101])
@pytest.mark.parametrize("whole_chunks", [False, True])
def test_parts_that_stand_for_others_count_as_all_rows(count, whole_chunks):
    found = counted(count, 4, whole_chunks=whole_chunks)

    assert sum(rows * times for rows, times in found) == pytest.approx(count)
    assert len(found) <= 3


def test_whole_parts_are_as_many_for_all_larger_numbers_of_rows():
    assert {tuple(rows for rows, _ in counted(count, 4, whole_chunks=True)) for count in range(5, 40)} == {(4, 4)}


def test_an_error_in_a_part_ends_the_repetition():
    begun = []

    @contextlib.contextmanager
    def repeat(number):
        begun.append(number)
        try:
            yield
        finally:
            begun.clear()

    with FakeTensorMode():
        rows = torch.empty(12)

    def fail_at_the_second():
        for part in parts(rows, 4):
            1 / (4 - part.start)

    with repeated_once(repeat, whole_chunks=False), pytest.raises(ZeroDivisionError):
        fail_at_the_second()

    assert not begun
    assert len(list(parts(rows, 4))) == 3
