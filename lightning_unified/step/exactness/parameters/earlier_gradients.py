"""Gradients of the batch before, which `training_step` may read: Lightning zeroes them after the step."""

import sys
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["GradientReadError", "GradientReads", "copies_of_gradients", "put_gradients"]

_OWN: Any = torch.Tensor.grad  # the descriptor
_PASSING = ("zero_grad", "_apply")  # torch's functions that read gradients to drop or move them
_INSIDE = ("torch._", "torch.fx.")  # torch's modules that copy tensors, or read gradients while they compile


class GradientReadError(BaseException):
    """A step reads a gradient of the batch before; users' `except Exception` must not catch it."""


class GradientReads:
    """Raises `GradientReadError` where code in the block reads a parameter's gradient before it writes it.

    Args:
        parameters: The parameters.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._waiting = {id(one) for one in parameters}

    def __enter__(self) -> Self:
        grad: Any = property(self._get, self._set, self._delete)
        torch.Tensor.grad = grad
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del torch.Tensor.grad

    def _get(self, tensor: Tensor) -> Tensor | None:
        if id(tensor) in self._waiting and not _is_passing(sys._getframe(1)):
            raise GradientReadError
        return _OWN.__get__(tensor)

    def _set(self, tensor: Tensor, value: Tensor | None) -> None:
        self._waiting.discard(id(tensor))
        _OWN.__set__(tensor, value)

    def _delete(self, tensor: Tensor) -> None:
        self._waiting.discard(id(tensor))
        _OWN.__delete__(tensor)


def _is_passing(reader: FrameType) -> bool:
    """Return whether torch reads a gradient without a use for its values."""
    return reader.f_code.co_name in _PASSING or reader.f_globals.get("__name__", "").startswith(_INSIDE)


def copies_of_gradients(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Return copies of the gradients that parameters have."""
    return [None if one.grad is None else one.grad.clone() for one in parameters]


def put_gradients(parameters: Iterable[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Give parameters their gradients of the batch before."""
    for one, gradient in zip(parameters, gradients, strict=True):
        one.grad = gradient
