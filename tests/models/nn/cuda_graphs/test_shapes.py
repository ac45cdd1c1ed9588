"""Shapes are recorded once they recur and no new ones come.

They make room once they are stale.
"""

import pytest
import torch

from lightning_unified.nn.cuda_graphs.calls import call_of
from lightning_unified.nn.cuda_graphs.shapes import SETTLED, KnownShapes


def call(rows):
    return call_of((torch.zeros(rows, 2),), {}, device=torch.device("cpu"))


@pytest.fixture
def shapes():
    known = KnownShapes(most=2)
    for rows in (3, 5):
        assert not known.count_call(call(rows).key)
        known.add(call(rows))
    return known


def test_only_shapes_that_came_again_are_due_and_the_largest_is_first(shapes):
    shapes.count_known_call(call(3).key)
    assert [one.elements for one in shapes.due({})] == [6]

    shapes.count_known_call(call(5).key)
    assert [one.elements for one in shapes.due({})] == [10, 6]
    assert [one.elements for one in shapes.due({call(5).key})] == [6]


def test_a_new_shape_begins_the_wait_again(shapes):
    waits = [shapes.count_known_call(call(3).key) for _ in range(SETTLED)]
    assert waits == [False] * (SETTLED - 1) + [True]

    shapes.unsettle()
    assert not shapes.count_known_call(call(3).key)


def test_a_shape_without_calls_makes_room_only_where_there_is_none(shapes):
    for _ in range(300):
        assert shapes.count_call(call(3).key)
    assert shapes.is_full
    assert shapes.drop_stale() == [call(5).key]
    assert not shapes.is_full
    assert shapes.drop_stale() == []
    assert not shapes.count_call(call(5).key)
