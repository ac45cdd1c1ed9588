"""Run a step on fake CPU tensors as another backend would run it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch._tensor as tensors
import torch.optim.optimizer as optimizers
import torch.utils._foreach_utils as foreach
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_unified.cost_model.backends.attention import cuda_attention, mps_attention, rocm_attention
from lightning_unified.cost_model.backends.autocast import Cast, casts_of
from lightning_unified.cost_model.backends.fused_kernels import (
    bias_in_place,
    fused_dropout,
    fused_rms_norm,
    lowered_affine_grid,
    scattered_one_hot,
)
from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.cost_model.backends.recurrent import cuda_recurrences, mps_recurrences
from lightning_unified.cost_model.backends.recurrent_cells import fused_gru_cell, fused_lstm_cell
from lightning_unified.nn.cross_entropy import kernels as cross_entropy

__all__ = ["BACKENDS", "mimic"]

BACKENDS = ("cpu", "cuda", "rocm", "mps")
_FOREACH = ("cuda", "rocm")
_PLAIN_OVERRIDES = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # pyright: ignore[reportFunctionMemberAccess]
_LOOKED_INTO: tuple[ModuleType, ...] = (torch.nn.functional, torch.functional, tensors, torch.autograd)


@contextmanager
def mimic(backend: str) -> Iterator[set[str]]:
    """Make operations on fake CPU tensors allocate and save the tensors they would on `backend`.

    Attention, dropout, recurrent layers and normalisation run as the backend's kernels. Autocast applies the backend's lists,
    whether it is opened for the backend or for `"cpu"`. Optimizers choose the backend's kernels. The block's end undoes all
    of it. Open the recorder and the fake mode outside this block.

    Yields:
        The names of the functions that ran by a rule of the backend with gradients enabled; empty for `"cpu"`.

    Raises:
        ValueError: For another backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)}.")
    called: set[str] = set()
    with ExitStack() as stack:
        stack.enter_context(_optimizer_kernels(backend))
        stack.enter_context(replaced(cross_entropy, "fused_on", lambda _: backend == "cuda"))
        if backend == "cpu":
            one_hot = partial(scattered_one_hot, torch.nn.functional.one_hot)
            stack.enter_context(replaced(torch.nn.functional, "one_hot", one_hot))
        else:
            stack.enter_context(_devices_are_the_cpu("mps" if backend == "mps" else "cuda"))
            for module in _LOOKED_INTO:
                for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
                    if hasattr(module, name):
                        takes_one = name == "has_torch_function"
                        check = (lambda arguments: _overrides(*arguments)) if takes_one else _overrides
                        stack.enter_context(replaced(module, name, check))
            stack.enter_context(_Target(_rules(backend), casts_of(backend), called))
        yield called


def _rules(backend: str) -> dict[str, Callable[..., Any]]:
    if backend == "mps":
        return {
            "scaled_dot_product_attention": mps_attention,
            "rms_norm": fused_rms_norm,
            "one_hot": scattered_one_hot,
            **mps_recurrences(),
        }
    return {
        "scaled_dot_product_attention": cuda_attention if backend == "cuda" else rocm_attention,
        "dropout": fused_dropout,
        "linear": bias_in_place,
        "rms_norm": fused_rms_norm,
        "affine_grid_generator": lowered_affine_grid,
        "one_hot": scattered_one_hot,
        "lstm_cell": fused_lstm_cell,
        "gru_cell": fused_gru_cell,
        **cuda_recurrences(),
    }


class _Target(TorchFunctionMode):
    """Routes torch's functions through a backend's rules, by name.

    Python functions of torch are entered, not replaced.
    """

    def __init__(self, rules: Mapping[str, Callable[..., Any]], casts: Mapping[str, Cast], called: set[str]) -> None:
        super().__init__()
        self._called = called
        self._routes = {name: (rules.get(name), casts.get(name)) for name in (*rules, *casts)}

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        route = self._routes.get(name)
        if route is None or isinstance(func, FunctionType) or "out" in kwargs:
            return func(*args, **kwargs)  # most calls read an attribute of a tensor
        rule, cast = route
        if rule is not None and torch.is_grad_enabled():
            self._called.add(name)
        operation = func if rule is None else partial(rule, func)
        if cast is None or not torch.is_autocast_enabled("cpu"):
            return operation(*args, **kwargs)
        return cast(operation, args, kwargs)


def _overrides(*arguments: Any) -> bool:
    """Return whether a user's tensor class handles the call itself; modes do not count."""
    kinds = (getattr(type(each), "__torch_function__", None) for each in arguments)
    return any(kind is not None and getattr(kind, "__func__", kind) not in _PLAIN_OVERRIDES for kind in kinds)


@contextmanager
def _devices_are_the_cpu(device: str) -> Iterator[None]:
    """Make autocast and gradient scalers of `device` act on the CPU, where the fake tensors are."""
    autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler
    open_autocast, make_scaler = autocast.__init__, scaler.__init__
    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def init_autocast(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == device:
            device_type, dtype = "cpu", dtype or dtype_of(device)
        open_autocast(self, device_type, dtype, *args, **kwargs)

    def init_scaler(self: Any, asked: str = "cuda", *args: Any, **kwargs: Any) -> None:
        make_scaler(self, "cpu" if asked == device else asked, *args, **kwargs)

    def enabled(device_type: str = "cuda") -> bool:
        return is_enabled("cpu" if device_type == device else device_type)

    def dtype(device_type: str) -> torch.dtype:
        return dtype_of("cpu" if device_type == device and is_enabled("cpu") else device_type)

    with ExitStack() as stack:
        stack.enter_context(replaced(autocast, "__init__", init_autocast))
        stack.enter_context(replaced(scaler, "__init__", init_scaler))
        stack.enter_context(replaced(torch, "is_autocast_enabled", enabled))
        stack.enter_context(replaced(torch, "get_autocast_dtype", dtype))
        yield


@contextmanager
def _optimizer_kernels(backend: str) -> Iterator[None]:
    """Make optimizers choose their kernel as on `backend`, on any device of the parameters.

    An optimizer with neither `foreach` nor `fused` set updates all parameters at once on CUDA, with one more copy of them as
    temporaries, and one after the other on a CPU and on MPS. It decides by the device and class of each parameter, and fake
    parameters have other ones.

    Source:
        `_default_to_fused_or_foreach` in torch's `optim/optimizer.py`, and the lists in `utils/_foreach_utils.py`.
    """
    devices = ["cuda", "cpu"] if backend in _FOREACH else []
    classes = [*optimizers._foreach_supported_types, FakeTensor]
    with ExitStack() as stack:
        for owner in (optimizers, foreach):
            stack.enter_context(replaced(owner, "_get_foreach_kernels_supported_devices", lambda: list(devices)))
            stack.enter_context(replaced(owner, "_foreach_supported_types", classes))
        yield
