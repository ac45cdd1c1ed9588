"""Weights and optimizer state around `optimizer.step()`: never left half-updated."""

import copy
import heapq
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["WeightsCopy", "WeightsWatch"]


class WeightsWatch:
    """Tells, after `optimizer.step()` failed, whether it had begun to write; costs no memory and no copy.

    Every in-place write moves a tensor's version counter. If none moved, the failed step changed nothing and can be repeated once
    the optimizer state that it had begun to create is dropped (torch's optimizers create a group's state before they write any of
    its weights; their foreach kernels allocate in between).

    Two kinds of write do not move the counter. Fused kernels (torch 2.13) write a whole parameter group and allocate nothing, so
    memory can only run out between groups: copies of a group's smallest parameters tell whether it was written. Writes through
    `.data`, as older optimizers do, cannot be told, so such an optimizer is never vouched for.

    Args:
        optimizer: The optimizer about to step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._books = _Books(optimizer)
        self._versions = [(tensor, tensor._version) for tensor in self._books.tensors]
        self._samples = [
            (sample, sample.detach().clone())
            for group in optimizer.param_groups
            if group.get("fused")
            for sample in _smallest(group)
        ]

    def restore(self) -> bool:
        """Drop the optimizer state created since; return False if something was written and the step cannot be repeated."""
        written = any(tensor._version != version for tensor, version in self._versions)
        if (
            written
            or _writes_through_data(type(self._optimizer))
            or not all(torch.equal(*pair) for pair in self._samples)
        ):
            return False
        self._books.restore()
        return True


class WeightsCopy:
    """A copy of weights and optimizer state, taken before `optimizer.step()`, to go back to whatever it did.

    Costs the bytes of the weights and of the optimizer state once more, and the time to copy them, at every step.

    Args:
        optimizer: The optimizer about to step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._books = _Books(optimizer)
        self._copies = [(tensor, tensor.detach().clone()) for tensor in self._books.tensors]

    def restore(self) -> bool:
        """Write the copies back and drop optimizer state created since; always True."""
        with torch.no_grad():
            for tensor, copied in self._copies:
                tensor.copy_(copied)
        self._books.restore()
        return True


class _Books:
    """What an optimizer's state and groups hold, by name: numbers by value, tensors by reference; and the tensors it may write.

    Step counts are plain numbers in many optimizers, in the state or in the group (`group["k"] += 1`), and are counted on before
    the first weight is written.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.tensors: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._state: dict[Any, Any] = {}
        for key, state in optimizer.state.items():
            self._state[key] = noted = dict(state) if isinstance(state, dict) else state
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    self.tensors.append(value)
                elif isinstance(value, (list, dict)):
                    noted[name] = copy.copy(value)
        self._groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        """Put every entry back, and drop those made since."""
        for key in list(self._optimizer.state):
            if key not in self._state:
                del self._optimizer.state[key]
        for key, noted in self._state.items():
            if isinstance(noted, dict):
                self._optimizer.state[key].clear()
                self._optimizer.state[key].update(noted)
            else:
                self._optimizer.state[key] = noted
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(options)


def _smallest(group: dict[str, Any]) -> list[Tensor]:
    """Return the three smallest parameters of `group` that a step will write."""
    return heapq.nsmallest(
        3, (parameter for parameter in group["params"] if parameter.grad is not None), key=Tensor.numel
    )


_VOUCHED: dict[type[Any], bool] = {}


def _writes_through_data(kind: type[Optimizer]) -> bool:
    """Return whether the source of `kind`'s step mentions `.data`, or cannot be read; torch's own optimizers do not use it."""
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
