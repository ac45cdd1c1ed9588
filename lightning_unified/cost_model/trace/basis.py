"""Express each figure of a trace as a sum of a few monomials of the step's size.

The size is rows and row length. The bytes of almost every storage are exact in one or two monomials:
a constant for weights, rows for a row's own share, rows times length for activations, rows times length squared for
materialised attention. The fit looks for the fewest monomials that reproduce a figure at every traced size, simplest first.
Kernels that round their buffers match none exactly. For these the fit accepts two monomials within a thousandth and 512
bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fit", "Size", "allowance", "fit_monomials", "rounds"]

Floats = NDArray[np.float64]
Size = tuple[int, int]  # rows, length

# Exponents of rows and length, in order of preference: a constant, one row's share, one token's, one pair of tokens' (materialised
# attention), the length of a row (positions, masks) and its square, a pair of rows' (contrastive losses).
_EXPONENTS: tuple[Size, ...] = ((0, 0), (1, 0), (1, 1), (1, 2), (0, 1), (0, 2), (2, 0))
_MOST_TERMS = 4
_ROUNDING, _SHARE, _BYTES = 1e-9, 1e-3, 512  # tolerance of float64; tolerances of kernels that round their buffers up


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """Figures as functions of a size.

    Attributes:
        coefficients: A row for each monomial, a column for each figure.
        exponents: Exponents of rows and length in each monomial.
        residuals: Largest deviation of each figure at the given sizes; 0 if exact.
    """

    coefficients: Floats
    exponents: tuple[Size, ...]
    residuals: Floats

    def at(self, size: Size) -> Floats:
        """Return the figures at `size`, rounded to whole numbers and never negative."""
        return np.maximum(np.rint(_powers([size], self.exponents)[0] @ self.coefficients), 0)


def fit_monomials(sizes: Sequence[Size], values: Floats) -> Fit:
    """Find for each figure the fewest monomials, at most four, that reproduce it at every size.

    A dimension that does not vary among `sizes` enters no monomial. A figure that no sum reproduces exactly counts as rounded
    if two monomials come near enough. This is tried before a fit with as many monomials as sizes, which would magnify the
    rounding.

    `values` has a row for each trace and a column for each figure.
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
    """Return for each figure whether it deviates by no more than a kernel's rounding.

    The tolerance is a thousandth of the largest value and 512 bytes.
    """
    return fit.residuals <= allowance(values.max(axis=0))


def allowance(values: Floats) -> Floats:
    """Return the deviation that counts as a kernel's rounding: 0.1 % of a figure and 512 bytes."""
    return _SHARE * values + _BYTES


def _improve(fit: Fit, design: Floats, values: Floats, terms: list[int], open_: NDArray[np.intp]) -> None:
    """Write the coefficients of `terms` for those figures of `open_` that they fit better."""
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
    """Return least-squares coefficients and largest deviations; None if undetermined.

    A deviation within float rounding is 0.
    """
    scale = np.abs(design).max(axis=0)
    scaled = design / scale
    if np.linalg.matrix_rank(scaled) < design.shape[1]:
        return None
    found = np.linalg.lstsq(scaled, values, rcond=None)[0] / scale[:, None]
    off = np.abs(design @ found - values)
    exact = (off <= _ROUNDING * np.abs(values)).all(axis=0)
    return found, np.where(exact, 0.0, off.max(axis=0))
