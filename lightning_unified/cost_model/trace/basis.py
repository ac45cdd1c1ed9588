"""Figures as sums of a few monomials of a step's size: rows, length of a row, micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fit", "Size", "fit_monomials", "rounds"]

Floats = NDArray[np.float64]
Size = tuple[int, int, int]  # rows, length, parts

# In the order in which they are preferred. A row's own share, a token's, a pair of tokens' (attention that is materialised),
# what is as long as a row (positions, masks), a pair of rows' (contrastive losses); then the same for a whole batch of parts.
_EXPONENTS: tuple[Size, ...] = (
    (0, 0, 0),
    (1, 0, 0),
    (1, 1, 0),
    (1, 2, 0),
    (0, 1, 0),
    (0, 2, 0),
    (2, 0, 0),
    (1, 0, 1),
    (1, 1, 1),
    (0, 0, 1),
)
_MOST_TERMS = 4
_ROUNDING, _SHARE, _BYTES = 1e-9, 1e-3, 512  # of float64; of what kernels round up to


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """Figures as functions of a size.

    Attributes:
        coefficients: A row for each monomial, a column for each figure.
        exponents: Of rows, length and parts in each monomial.
        residuals: How far each figure is off at most at the sizes that were given; 0 where it is exact.
    """

    coefficients: Floats
    exponents: tuple[Size, ...]
    residuals: Floats

    def at(self, size: Size) -> Floats:
        """Return the figures at `size`, whole and never negative."""
        return np.maximum(np.rint(_powers([size], self.exponents)[0] @ self.coefficients), 0)


def fit_monomials(sizes: Sequence[Size], values: Floats) -> Fit:
    """Find for each figure the fewest monomials that give it exactly at every size; four at most.

    A size that does not vary among `sizes` is in no monomial. A figure that is exact in none is taken for a rounded one if two
    monomials come near enough, before as many monomials as there are sizes are laid through it, which would magnify the rounding.

    Args:
        sizes: Of the traces.
        values: A row for each trace, a column for each figure.

    Returns:
        The coefficients, and how far off they are.
    """
    varies = [len(set(axis)) > 1 for axis in zip(*sizes, strict=True)]
    exponents = tuple(
        powers
        for powers in _EXPONENTS
        if all(varying or not power for varying, power in zip(varies, powers, strict=True))
    )
    fit = Fit(
        coefficients=np.zeros((len(exponents), values.shape[1])),
        exponents=exponents,
        residuals=np.full(values.shape[1], np.inf),
    )
    design = _powers(sizes, exponents)
    points = len(set(sizes))
    for count in range(1, min(points, len(exponents), _MOST_TERMS) + 1):
        rounded = rounds(fit, values) if 2 < count == points else np.zeros(values.shape[1], dtype=bool)
        open_ = np.flatnonzero((fit.residuals > 0) & ~rounded)
        for terms in combinations(range(len(exponents)), count):
            if open_.size:
                _improve(fit, design, values, list(terms), open_)
                open_ = open_[fit.residuals[open_] > 0]
    return fit


def rounds(fit: Fit, values: Floats) -> NDArray[np.bool_]:
    """Say for each figure whether it is as near as kernels round: within a thousandth and 512 bytes."""
    return fit.residuals <= _SHARE * values.max(axis=0) + _BYTES


def _improve(fit: Fit, design: Floats, values: Floats, terms: list[int], open_: NDArray[np.intp]) -> None:
    """Write the coefficients of `terms` for those of the figures `open_` that they come nearer to."""
    solved = _solve(design[:, terms], values[:, open_])
    if solved is None:
        return
    found, off = solved
    better = off < fit.residuals[open_]
    fit.coefficients[:, open_[better]] = 0
    fit.coefficients[np.array(terms)[:, None], open_[better]] = found[:, better]
    fit.residuals[open_[better]] = off[better]


def _powers(sizes: Sequence[Size], exponents: Sequence[Size]) -> Floats:
    return np.prod(np.asarray(sizes, dtype=np.float64)[:, None, :] ** np.asarray(exponents)[None], axis=2)


def _solve(design: Floats, values: Floats) -> tuple[Floats, Floats] | None:
    """Return least squares' coefficients and the largest deviation of each figure, 0 if it is rounding; None if undetermined."""
    scale = np.abs(design).max(axis=0)
    scaled = design / scale
    if np.linalg.matrix_rank(scaled) < design.shape[1]:
        return None
    found = np.linalg.lstsq(scaled, values, rcond=None)[0] / scale[:, None]
    off = np.abs(design @ found - values)
    exact = (off <= _ROUNDING * np.abs(values)).all(axis=0)
    return found, np.where(exact, 0.0, off.max(axis=0))
