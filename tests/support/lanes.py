"""Lanes of a test matrix: chosen cells run always, the other cells with `-m slow`."""

from collections.abc import Iterable
from itertools import product

import pytest


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
