"""The lanes of a test matrix hold the cells that their helpers name."""

import pytest

from tests.support.lanes import first_cells, slow


def cells_of(mark):
    """Return the values of each cell, and whether it is slow."""
    return [(cell.values, any(one.name == "slow" for one in cell.marks)) for cell in mark.args[1]]


def test_cells_after_the_first_ones_are_slow():
    assert cells_of(first_cells(2, "name", "abc")) == [(("a",), False), (("b",), False), (("c",), True)]


def test_cells_that_are_slow_already_do_not_count():
    assert cells_of(first_cells(1, "name", [slow(1), 2, 3])) == [((1,), True), ((2,), False), ((3,), True)]


def test_a_tuple_is_one_value_of_one_name_and_several_of_several():
    assert cells_of(first_cells(1, "name", [(1, 2)])) == [(((1, 2),), False)]
    assert cells_of(first_cells(1, ("one", "other"), [(1, 2)])) == [((1, 2), False)]


def test_marks_and_names_of_cells_are_kept():
    (cell,) = first_cells(0, "name", [pytest.param(1, marks=pytest.mark.gpu, id="one")]).args[1]

    assert ([mark.name for mark in cell.marks], cell.id) == (["gpu", "slow"], "one")
