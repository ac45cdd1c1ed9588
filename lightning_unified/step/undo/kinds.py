"""Classify values for the walk: immutable, tensor, module, container, object, generator."""

import array
import enum
import functools
import itertools
import queue
import random
import types
from collections import deque
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_unified.nn.second_run.libraries import is_ours
from lightning_unified.step.undo.states import Drawn

__all__ = ["Kind", "holds_iterators", "kind_of"]


class Kind(enum.Enum):
    """How a value is recorded and restored."""

    INERT = enum.auto()  # cannot change, or the walk skips it
    TENSOR = enum.auto()
    ARRAY = enum.auto()
    MODULE = enum.auto()
    MAPPING = enum.auto()
    LIST = enum.auto()
    SET = enum.auto()
    DEQUE = enum.auto()
    TUPLE = enum.auto()
    OBJECT = enum.auto()  # recorded by its attributes
    STATE = enum.auto()  # has a state that can be read and set: generators, bytearrays
    ITERATOR = enum.auto()
    PARTIAL = enum.auto()  # of functools: its arguments are visited
    FUNCTION = enum.auto()  # its closure variables, defaults and attributes are visited
    METHOD = enum.auto()  # bound to an object, which is visited
    NAMED = enum.auto()  # recorded by those of its attributes that the step names: data and optimizers

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python


_STATES = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
    bytearray,
    array.array,
    queue.SimpleQueue,
)
_ITERATORS: tuple[type, ...] = (
    *(kind for kind in vars(itertools).values() if isinstance(kind, type) and hasattr(kind, "__next__")),
    enumerate,
    zip,
    map,
    filter,
    reversed,
    types.GeneratorType,
    *(type(iter(kind())) for kind in (list, tuple, str, bytes, bytearray, dict, set, deque)),
    *(type(reversed(kind())) for kind in (list, dict)),
    *(type(iter(view)) for view in ({}.values(), {}.items())),
    type(iter("é")),
    type(iter(range(0))),
    type(iter(range(1 << 70))),
    type(iter(int, 1)),
    type(iter(np.zeros(1))),  # over a class with `__getitem__`
    Drawn,
)
_WIDEST = 1000  # entries of a tuple that are searched for iterators
_NEVER = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    enum.Enum,
    np.generic,
)
# Base classes of users' objects that a step does not change: loggers, and the Trainer's own parts.
_NOT_OF_STEPS = (Trainer, Strategy, Logger)
# Base classes of large objects that others change: iteration, worker processes and optimizer steps.
_NAMED = (LightningDataModule, Optimizer, DataLoader, Dataset, Sampler)
_BY_BASE: tuple[tuple[type | tuple[type, ...], Kind], ...] = (
    (_NEVER, Kind.INERT),
    ((random.SystemRandom, np.memmap), Kind.INERT),
    (Tensor, Kind.TENSOR),
    (nn.Module, Kind.MODULE),
    (np.ndarray, Kind.ARRAY),
    (_STATES, Kind.STATE),
    (dict, Kind.MAPPING),
    (list, Kind.LIST),
    (set, Kind.SET),
    (deque, Kind.DEQUE),
    (tuple, Kind.TUPLE),
    (functools.partial, Kind.PARTIAL),
    (types.FunctionType, Kind.FUNCTION),
    (types.MethodType, Kind.METHOD),
    (_ITERATORS, Kind.ITERATOR),
    (_NAMED, Kind.NAMED),
)


@functools.lru_cache(maxsize=4096)
def kind_of(kind: type) -> Kind:
    """Return how values of the type `kind` are recorded."""
    for base, found in _BY_BASE:
        if issubclass(kind, base):
            return found
    if is_ours(kind) or issubclass(kind, _NOT_OF_STEPS):
        return Kind.INERT
    has_attributes = kind.__dictoffset__ != 0 or any(vars(base).get("__slots__") for base in kind.__mro__)
    return Kind.OBJECT if has_attributes else Kind.INERT


def holds_iterators(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple, or a tuple in it, holds iterators."""
    kinds = [(kind_of(type(one)), one) for one in value[:_WIDEST]]
    return any(kind is Kind.ITERATOR or (kind is Kind.TUPLE and holds_iterators(one)) for kind, one in kinds)
