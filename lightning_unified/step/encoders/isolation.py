"""Run an encoder and restore its modes, buffers, attributes and random generators."""

from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.undone_run import draws_or_mixes
from lightning_unified.step.undo.changes import is_same

__all__ = ["IsolatedEncoder", "everything_off", "noise_off", "statistics_off", "written"]

_CONTAINERS = (list, dict, set, deque)
_OF_MODULES = frozenset(vars(nn.Module()))


class IsolatedEncoder:
    """Restores the state that calls of an encoder change inside the block.

    Inside the block, the encoder's buffers are copies. The random generators of the host and of `device` are restored too.
    """

    def __init__(self, encoder: nn.Module, device: torch.device) -> None:
        self._owners = {name or "the encoder itself": owner for name, owner in encoder.named_modules()}
        self._generators = GeneratorWatch(device)

    def __enter__(self) -> Self:
        self._before = [
            (owner, dict(vars(owner)), _containers(owner), dict(owner._buffers)) for owner in self._owners.values()
        ]
        self._random = self._generators.note()
        copies = {id(one): one.detach().clone() for *_, own in self._before for one in own.values() if one is not None}
        for owner, _, _, buffers in self._before:
            owner._buffers.update({name: None if one is None else copies[id(one)] for name, one in buffers.items()})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for owner, attributes, containers, buffers in self._before:
            vars(owner).clear()
            vars(owner).update(attributes)
            for name, entries in containers.items():
                _fill(attributes[name], entries)
            owner._buffers.clear()
            owner._buffers.update(buffers)
        self._generators.restore(self._random)

    def state(self) -> dict[str, Any]:
        """Return copies of the buffers, and references to the attributes, by name."""
        found: dict[str, Any] = {}
        for name, owner in self._owners.items():
            for key, buffer in owner._buffers.items():
                found[f"the buffer {key!r} of {name}"] = None if buffer is None else buffer.detach().clone()
            for key, value in vars(owner).items():
                if key not in _OF_MODULES:
                    found[f"the attribute {key!r} of {name}"] = value.copy() if type(value) in _CONTAINERS else value
        return found

    def draws(self, call: Callable[[], Any]) -> bool:
        """Return whether `call()` draws random numbers."""
        before = self._generators.note()
        call()
        return not is_same(before, self._generators.note())


def written(before: Mapping[str, Any], after: Mapping[str, Any], *, only: str = "") -> str | None:
    """Return the first name at which two states differ; None if they are equal.

    Only names that contain the text `only` are compared.
    """
    for name in dict.fromkeys((*after, *before)):
        if only in name and not (name in before and name in after and is_same(before[name], after[name])):
            return name
    return None


def statistics_off(encoder: nn.Module) -> None:
    """Make BatchNorm use its running statistics."""
    for child in encoder.modules():
        if isinstance(child, _BatchNorm):
            child.training = False


def noise_off(encoder: nn.Module) -> None:
    """Put layers with dropout or BatchNorm into eval mode.

    Recurrent layers keep their mode; their dropout is set to 0.
    """
    for child in encoder.modules():
        if draws_or_mixes(child):
            child.training = False
        if isinstance(child, nn.RNNBase):
            child.dropout = 0.0


def everything_off(encoder: nn.Module) -> None:
    """Put the whole encoder into eval mode, with dropout off."""
    noise_off(encoder)
    for child in encoder.modules():
        child.training = False


def _containers(owner: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(owner).items() if name not in _OF_MODULES}
    return {name: value.copy() for name, value in own.items() if type(value) in _CONTAINERS}


def _fill(container: Any, entries: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(entries)
