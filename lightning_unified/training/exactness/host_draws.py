"""Random draws by Python's `random` and NumPy's `numpy.random`, made the same for every row.

Masks for audio (SpecAugment of transformers), mixing weights and augmentations are often drawn there, row by row or for all rows at once.
Such draws cannot be replayed by row: a run over fewer rows draws less. In a step without its noise, each call starts from the same state
and gives each row what it gives the first one. A permutation of rows still is one, so that a step that mixes rows by it still mixes rows.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np

__all__ = ["equal_host_draws"]

_SEED = 0
_ORDERS = ("permutation", "shuffle", "choice", "sample", "choices")  # of entries; nothing of them is given to all rows
_OF_NUMPY = (
    "rand",
    "randn",
    "random",
    "random_sample",
    "uniform",
    "normal",
    "standard_normal",
    "randint",
    "beta",
    "binomial",
)
_OF_NUMPY = (
    *_OF_NUMPY,
    "exponential",
    "gamma",
    "poisson",
    "dirichlet",
    "multinomial",
    "multivariate_normal",
    "laplace",
)
_OF_PYTHON = (
    "random",
    "uniform",
    "randint",
    "randrange",
    "gauss",
    "normalvariate",
    "betavariate",
    "expovariate",
    "triangular",
)


@contextmanager
def equal_host_draws() -> Iterator[None]:
    """Let every draw from the two global generators be the same for each row inside the block; the caller puts back their states."""
    with ExitStack() as undo:
        for module, names, seed in ((random, _OF_PYTHON, random.seed), (np.random, _OF_NUMPY, np.random.seed)):
            for name in (*names, *_ORDERS):
                if (draw := getattr(module, name, None)) is not None:
                    undo.callback(setattr, module, name, draw)
                    setattr(module, name, _equal(draw, seed, spreads=name not in _ORDERS))
        yield


def _equal(draw: Callable[..., Any], seed: Callable[[int], None], *, spreads: bool) -> Callable[..., Any]:
    @wraps(draw)
    def first(*args: Any, **kwargs: Any) -> Any:
        seed(_SEED)
        drawn = draw(*args, **kwargs)
        if spreads and isinstance(drawn, np.ndarray) and drawn.ndim:
            drawn[...] = drawn[:1]
        return drawn

    return first
