"""Shapes are recorded once they recur and no new ones come.

They make room once they are stale.
"""

import pytest
import torch

from lightning_unified.nn.cuda_graphs.calls import call_of
from lightning_unified.nn.cuda_graphs.shapes import FEW, SETTLED, KnownShapes


def call(rows, length=2):
    return call_of((torch.zeros(rows, length),), {}, device=torch.device("cpu"))


def known(*calls, most=2):
    shapes = KnownShapes(most=most)
    for one in calls:
        assert not shapes.count_call(one.key)
        shapes.add(one)
    return shapes


@pytest.fixture
def shapes():
    """Two shapes that differ in their rows only."""
    return known(call(3), call(5))


def test_few_shapes_that_differ_in_rows_only_are_all_due_at_the_next_call(shapes):
    assert shapes.count_known_call(call(3).key)
    assert [one.elements for one in shapes.due({})] == [10, 6]
    assert [one.elements for one in shapes.due({call(5).key})] == [6]


@pytest.mark.parametrize("calls", [(call(3), call(3, 4)), [call(rows) for rows in range(1, FEW + 2)]])
def test_shapes_of_other_lengths_or_many_shapes_wait_for_quiet(calls):
    shapes = known(*calls, most=16)
    waits = [shapes.count_known_call(calls[0].key) for _ in range(SETTLED)]

    assert waits == [False] * (SETTLED - 1) + [True]
    assert shapes.due({}) == [calls[0]]

    shapes.unsettle()
    assert not shapes.count_known_call(calls[0].key)


def test_only_shapes_that_came_again_are_due_and_the_largest_is_first():
    shapes = known(call(3, 4), call(5))
    shapes.count_known_call(call(5).key)
    assert [one.elements for one in shapes.due({})] == [10]

    shapes.count_known_call(call(3, 4).key)
    assert [one.elements for one in shapes.due({})] == [12, 10]
    assert [one.elements for one in shapes.due({call(3, 4).key})] == [10]


def test_a_shape_without_calls_makes_room_only_where_there_is_none(shapes):
    for _ in range(300):
        assert shapes.count_call(call(3).key)
    assert shapes.is_full
    assert shapes.drop_stale() == [call(5).key]
    assert not shapes.is_full
    assert shapes.drop_stale() == []
    assert not shapes.count_call(call(5).key)
