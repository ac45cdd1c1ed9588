"""Lanes of a test matrix: chosen cells run always, the other cells with `-m slow`."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

SLOW = pytest.mark.slow


def slow(*values):
    """Return the cell of `values` with the mark `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def some(cells: Iterable, *fast) -> list:
    """Return all `cells`, marked `slow` except those listed in `fast`.

    Raises:
        ValueError: If a cell in `fast` is not among `cells`.
    """
    cells = list(cells)
    if unknown := [cell for cell in fast if cell not in cells]:
        raise ValueError(f"{unknown} are not among the cells {cells}; name cells of the matrix")
    return [cell if cell in fast else slow(*(cell if isinstance(cell, tuple) else (cell,))) for cell in cells]


def crossed(*axes: Iterable, fast: Iterable[tuple]) -> list:
    """Return the product of `axes`, marked `slow` except the cells listed in `fast`."""
    return some(product(*axes), *fast)


def first_cells(number: int, names: str | tuple[str, ...], cells: Iterable, **options: Any) -> pytest.MarkDecorator:
    """Return the mark `parametrize` of a test, of whose `cells` the first `number` run always.

    The further cells are `slow`; those that are so already do not count.
    """
    single = isinstance(names, str) and "," not in names
    laned: list = []
    for cell in cells:
        values, marks, name = cell if isinstance(cell, ParameterSet) else ((cell,) if single else tuple(cell), (), None)
        is_slow = any(mark.name == SLOW.name for mark in marks)
        number -= not is_slow
        laned.append(pytest.param(*values, marks=marks if is_slow or number >= 0 else (*marks, SLOW), id=name))
    return pytest.mark.parametrize(names, laned, **options)
