"""Keep weights and optimizer state from being half-updated by `optimizer.step()`."""

import copy
import inspect
import operator
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, Optimizer

__all__ = ["WeightsCopy", "WeightsWatch"]

_version = operator.attrgetter("_version")


class WeightsWatch:
    """Detects whether a failed `optimizer.step()` had begun to write, without copying weights.

    Only a few of the smallest parameters are copied, and only for some fused kernels.

    Every in-place write moves a tensor's version counter. If none moved, the failed step changed nothing. It can be
    repeated once the optimizer state that it began to create is dropped. Torch's optimizers create a group's state
    before they write any of its weights; their foreach kernels allocate in between.

    Two kinds of write do not move the counter:

    - Fused kernels (torch 2.13) write a whole parameter group and allocate nothing, so memory can only run out between
      groups. Torch's own optimizers that count steps in tensors increment these first, and that moves the tensors'
      counters. For any other fused group, copies of its smallest parameters show whether it was written.
    - Writes through `.data`, as in older optimizers, cannot be detected. A failed step of such an optimizer counts as
      written.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._books = _books_of(optimizer)
        self._versions = list(map(_version, self._books.tensors))
        self._samples = [(sample, sample.detach().clone()) for sample in self._books.samples(optimizer)]

    def restore(self) -> bool:
        """Drop state created since; return False if the step has written and cannot be repeated."""
        written = list(map(_version, self._books.tensors)) != self._versions
        if (
            written
            or _writes_through_data(type(self._optimizer))
            or not all(torch.equal(*pair) for pair in self._samples)
        ):
            return False
        self._books.restore(self._optimizer)
        return True


class WeightsCopy:
    """A copy of weights and optimizer state before `optimizer.step()`, to restore after it.

    At every step it costs the bytes of the weights and of the optimizer state once more, and the time to copy them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._books = _books_of(optimizer)
        self._copies = [(tensor, tensor.detach().clone()) for tensor in self._books.tensors]

    def restore(self) -> bool:
        """Write the copies back and drop optimizer state created since; always True."""
        with torch.no_grad():
            for tensor, copied in self._copies:
                tensor.copy_(copied)
        self._books.restore(self._optimizer)
        return True


class _Books:
    """The contents of an optimizer's state and groups, by name, and the tensors it may write.

    Many optimizers count steps in plain numbers, in the state or in the group (`group["k"] += 1`). They increment these
    before they write the first weight. One object serves an optimizer as long as that exists. It records the
    state again only if that has changed, because it runs before every step and there are as many states as parameters.

    Args:
        optimizer: The optimizer to record; not referenced afterwards, so that it can be freed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.tensors: list[Tensor] = []
        self._known: list[Any] = []
        self._state: dict[Any, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._parameters: list[Tensor] = []
        self._by_size: list[list[Tensor]] = []
        self.note(optimizer)

    def note(self, optimizer: Optimizer) -> None:
        """Record the present state and groups."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._groups = list(map(dict, optimizer.param_groups))
        entries = _entries(optimizer.state)
        if not (self._same(entries, self._known) and self._same(parameters, self._parameters)):
            self._note_state(optimizer, parameters)
            by_reference = all(isinstance(entry, (Tensor, str)) for entry in entries)
            self._known = entries if by_reference else []

    def samples(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the three smallest parameters of each group whose writes move no version counter.

        Such a group has a fused kernel. Parameters without a gradient are left out, because the kernel does not write
        them.
        """
        written = (
            (parameter for parameter in by_size if parameter.grad is not None)
            for group, by_size in zip(optimizer.param_groups, self._by_size, strict=True)
            if group.get("fused")
        )
        return [sample for smallest in written for sample in islice(smallest, 3)]

    def restore(self, optimizer: Optimizer) -> None:
        """Restore every recorded entry, and drop later ones."""
        for key in list(optimizer.state):
            if key not in self._state:
                del optimizer.state[key]
        for key, noted in self._state.items():
            if isinstance(noted, dict):
                optimizer.state[key].clear()
                optimizer.state[key].update(noted)
            else:
                optimizer.state[key] = noted
        for group, options in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(options)

    @staticmethod
    def _same(now: list[Any], before: list[Any]) -> bool:
        return len(now) == len(before) > 0 and all(map(operator.is_, now, before))

    def _note_state(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        self._parameters, self.tensors, self._state = parameters, list(parameters), {}
        self._by_size = [
            [] if _counts_in_tensors(optimizer, group) else sorted(group["params"], key=Tensor.numel)
            for group in optimizer.param_groups
        ]
        for key, state in optimizer.state.items():
            self._state[key] = noted = dict(state) if isinstance(state, dict) else state
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    self.tensors.append(value)
                elif isinstance(value, (list, dict)):
                    noted[name] = copy.copy(value)


def _counts_in_tensors(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a step of `group` moves a tensor's version before a kernel writes weights.

    Source:
        torch/optim/adam.py, adagrad.py (torch 2.11, 2.13): `_foreach_add_(device_state_steps, 1)`, then the fused
            kernel.
    """
    return type(optimizer) in (Adam, AdamW, Adagrad) and all(
        isinstance(optimizer.state.get(parameter, {}).get("step"), Tensor) for parameter in group["params"]
    )


_BOOKS: "WeakKeyDictionary[Optimizer, _Books]" = WeakKeyDictionary()


def _books_of(optimizer: Optimizer) -> _Books:
    """Return the optimizer's books, with its present state recorded."""
    books = _BOOKS.get(optimizer)
    if books is None:
        books = _BOOKS[optimizer] = _Books(optimizer)
    else:
        books.note(optimizer)
    return books


def _entries(state: Mapping[Any, Any]) -> list[Any]:
    """Return keys, names and values of all states, in order and without a Python loop.

    The list is empty if a state is no dict.
    """
    states = list(state.values())
    try:
        return [*state, *chain.from_iterable(states), *chain.from_iterable(map(dict.values, states))]
    except TypeError:
        return []


_VOUCHED: dict[type[Any], bool] = {}


def _writes_through_data(kind: type[Optimizer]) -> bool:
    """Return whether the source of `kind`'s step mentions `.data`, or cannot be read.

    Torch's own optimizers do not use `.data`, so their sources are not searched.
    """
    if kind not in _VOUCHED:
        try:
            sources = [
                inspect.getsource(base)
                for base in kind.__mro__
                if base not in (Optimizer, object) and not base.__module__.startswith("torch.")
            ]
            _VOUCHED[kind] = not any(".data" in source for source in sources)
        except (OSError, TypeError):
            _VOUCHED[kind] = False
    return not _VOUCHED[kind]
