"""Build modules without memory for their weights, so that plans may be larger than this machine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from typing_extensions import override

from lightning_unified.errors import ConfigurationError

__all__ = ["without_memory"]

_T = TypeVar("_T")
# Elements. Constructors read depths or rates from tensors this small; all of them together take little memory.
_SMALL = 2**16


def without_memory(build: Callable[[], _T], *, what: str) -> _T:
    """Call `build` with its tensors on the meta device: with shapes and dtypes, without values.

    A constructor that reads values of its own tensors (`torch.linspace(…).tolist()`) fails on the meta device. It is then called a
    second time, with small tensors real and only large ones on the meta device.

    Args:
        build: Makes the module; it may be called twice.
        what: Its name, for the message.

    Raises:
        ConfigurationError: If it can be built neither way.
    """
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, ValueError) as error:  # `make` turns a constructor's error into a ValueError
        if not _needs_values(error):
            raise
    try:
        with _LargeOnMeta():
            return build()
    except (RuntimeError, ValueError) as error:
        if not _needs_values(error):
            raise
        raise ConfigurationError(
            f"{what} cannot be built without memory: it reads values of large tensors while it is made "
            f"({str(error).splitlines()[0]}). Give a function with --module that makes it without pretrained weights, from its "
            "configuration alone."
        ) from error


def _needs_values(error: BaseException | None) -> bool:
    """Return whether `error`, or its cause, is about the missing values of a meta tensor."""
    while error is not None:
        text = str(error).lower()
        if "meta" in text and ("tensor" in text or "device" in text):
            return True
        error = error.__cause__ or error.__context__
    return False


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors on the meta device.

    The context `torch.device("meta")` does so for all tensors.
    """

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = dict(kwargs or {})
        if func in _device_constructors() and arguments.get("device") is None:
            size = _size(func, args, arguments)
            arguments["device"] = "meta" if size is not None and size > _SMALL else "cpu"
        return func(*args, **arguments)


def _size(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of elements that a constructor would create, None if it cannot be known before."""
    try:
        made = func(*args, **{**kwargs, "device": "meta", **({"generator": None} if "generator" in kwargs else {})})
    except (RuntimeError, TypeError):
        return None
    return made.numel() if isinstance(made, torch.Tensor) else None
