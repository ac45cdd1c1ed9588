"""Make draws by Python, NumPy and a module's own generators equal for every row.

Masks for audio (SpecAugment of transformers), mixing weights and augmentations often come from these generators, row by row or for all
rows at once. A replay by row is impossible: a run over fewer rows draws fewer numbers. For a step without noise, each call therefore
starts from the same state, and every row gets the first row's draw. A permutation of rows stays one, so a step that mixes rows by it
still mixes rows.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
from torch import nn

from lightning_unified.nn.second_run.libraries import is_ours
from lightning_unified.step.undo.kinds import Kind, kind_of
from lightning_unified.step.undo.states import set_state, state_of

__all__ = ["equal_host_draws"]

_SEED = 0
# these functions order or choose entries: the first row's draw is not copied to other rows
_ORDERS = ("permutation", "shuffle", "choice", "sample", "choices")
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
    "exponential",
    "gamma",
    "poisson",
    "dirichlet",
    "multinomial",
    "multivariate_normal",
    "laplace",
)
_OF_GENERATORS = (*_OF_NUMPY, "integers", "standard_exponential", "standard_gamma", "lognormal")
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
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
def equal_host_draws(module: nn.Module | None = None) -> Iterator[None]:
    """Make every draw the same for each row inside the block.

    The caller restores the states of the two global generators.

    Args:
        module: A module whose own generators also draw equally: in its attributes, in objects that it holds, and in the globals of the
            files of its classes.
    """
    with ExitStack() as undo:
        for holder, name, generator in _generators_of(module):
            undo.callback(set_state, generator, state_of(generator))
            undo.callback(holder.__setitem__, name, generator)
            holder[name] = _equal_generator(generator)
        for owner, names, seed in ((random, _OF_PYTHON, random.seed), (np.random, _OF_NUMPY, np.random.seed)):
            for name in (*names, *_ORDERS):
                if (draw := getattr(owner, name, None)) is not None:
                    undo.callback(setattr, owner, name, draw)
                    setattr(owner, name, _equal(draw, seed, spreads=name not in _ORDERS))
        yield


def _generators_of(module: nn.Module | None) -> Sequence[tuple[dict[str, Any], str, Any]]:
    """Return generators, each with the dict and the name that hold it."""
    if module is None:
        return ()
    files = {kind.__module__ for kind in type(module).__mro__ if not is_ours(kind) and kind is not object}
    own = [value for child in module.modules() for value in vars(child).values()]
    objects = [value for value in own if kind_of(type(value)) is Kind.OBJECT and hasattr(value, "__dict__")]
    beside = [sys.modules[name] for name in files if name in sys.modules]
    holders = {id(one): vars(one) for one in (*module.modules(), *objects, *beside)}.values()
    return [(one, name, value) for one in holders for name, value in one.items() if type(value) in _GENERATORS]


def _equal_generator(generator: Any) -> Any:
    """Return a generator whose every call starts from the current state of `generator`."""
    state = state_of(generator)
    kind: Any = type(generator)
    spreads: dict[str, bool] = dict.fromkeys(_OF_PYTHON if kind is random.Random else _OF_GENERATORS, True)
    spreads.update(dict.fromkeys(_ORDERS, False))

    def drawing(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name not in spreads:
            return value
        return _equal(value, lambda _: set_state(self, state), spreads=spreads[name])

    equal: Any = type(f"Equal{kind.__name__}", (kind,), {"__getattribute__": drawing})
    if kind is random.Random:
        twin = equal()
        set_state(twin, state)
        return twin
    return equal(generator.bit_generator if kind is np.random.Generator else generator._bit_generator)


def _equal(draw: Callable[..., Any], seed: Callable[[int], None], *, spreads: bool) -> Callable[..., Any]:
    @wraps(draw)
    def first(*args: Any, **kwargs: Any) -> Any:
        seed(_SEED)
        drawn = draw(*args, **kwargs)
        if spreads and isinstance(drawn, np.ndarray) and drawn.ndim:
            drawn[...] = drawn[:1]
        return drawn

    return first
