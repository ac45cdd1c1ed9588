"""Saved attention output: a checkpointed block runs its attention kernels only once.

Everything else in the block runs twice. Attention is the part of a block whose time grows with the square of the length. Its
kernels (flash, memory-efficient, cuDNN) return little that must be saved: the output, and one number for each head and position. A
kernel that does not run again draws no random numbers, so this module sets the generator to its state after the first run. Without
that, all dropout after an attention with dropout would differ.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from typing_extensions import override

__all__ = ["SavedAttention", "attention_kernels", "generator_state", "graph_contexts", "restored", "saved_once"]

# Kernels of torch 2.11 to 2.13 that save their output for the backward pass; math attention consists of other operations.
_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)


@cache
def attention_kernels() -> frozenset[Any]:
    """Return the attention operations of this torch whose outputs are saved.

    MPS runs none of them in training.
    """
    packets = (getattr(torch.ops.aten, name, None) for name in _KERNELS)
    return frozenset(packet.default for packet in packets if packet is not None)


def graph_contexts() -> Any:
    """Return a `context_fn` for `torch.utils.checkpoint` in compiled graphs.

    Compiled graphs restore random states themselves.
    """
    return partial(create_selective_checkpoint_contexts, list(attention_kernels()))


class _Output(NamedTuple):
    """Result of one kernel run, with a generator state.

    The state is that of the device's generator after the run, if the kernel drew from it.
    """

    kernel: Any
    result: Any
    noise: Tensor | None


class SavedAttention:
    """Outputs of the attention kernels in one call of a block, in order.

    Attributes:
        count: Number of saved outputs.
    """

    def __init__(self) -> None:
        self._outputs: list[_Output] = []

    @property
    def count(self) -> int:
        return len(self._outputs)

    def first(self) -> AbstractContextManager[Any]:
        """Return the context of the first run, which saves outputs."""
        return _Keeping(self._outputs)

    def again(self) -> AbstractContextManager[Any]:
        """Return the context of a further run, which returns the saved outputs."""
        return _Giving(self._outputs)


_INNERMOST = threading.local()  # the mode that runs, for attention that is no kernel
_IN_CHUNKS = "attention in chunks"


def saved_once(compute: Callable[[], Tensor], *, device: torch.device, draws: bool, trains: bool) -> Tensor:
    """Return the output of an attention of many operations, and save it as that of one kernel.

    In the first run of a block whose attention outputs are saved, it is computed and saved. In the second run the saved output is returned,
    and `compute` is not called.

    Args:
        compute: Computes the output.
        device: The device of the output.
        draws: Whether `compute` draws random numbers.
        trains: Whether an input requires a gradient; otherwise nothing is saved.
    """
    mode = getattr(_INNERMOST, "mode", None)
    return compute() if mode is None or not trains else mode.once(compute, device, draws=draws)


class _Attentive(TorchDispatchMode):
    """Dispatch mode that `saved_once` finds while it runs."""

    @override
    def __enter__(self) -> Self:
        self._outer = getattr(_INNERMOST, "mode", None)
        _INNERMOST.mode = self
        return super().__enter__()

    @override
    def __exit__(self, *details: object) -> None:
        _INNERMOST.mode = self._outer
        super().__exit__(*details)


class _Keeping(_Attentive):
    """Dispatch mode that saves the outputs of attention kernels whose inputs require a gradient.

    For these, autograd forbids writing over an output, so a saved output stays valid. Without a gradient, a block may overwrite the
    output. Then nothing is saved, and the kernel runs twice.
    """

    def __init__(self, outputs: list[_Output]) -> None:
        super().__init__()
        self._outputs = outputs

    def once(self, compute: Callable[[], Tensor], device: torch.device, *, draws: bool) -> Any:
        result = compute()
        self._outputs.append(_Output(_IN_CHUNKS, _aliases(result), generator_state(device) if draws else None))
        return result

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_kept(func, args):
            noise = generator_state(args[0].device) if _draws(func, args, kwargs) else None
            self._outputs.append(_Output(func, _aliases(result), noise))
        return result


class _Giving(_Attentive):
    """Dispatch mode that returns saved outputs instead of running the kernels."""

    def __init__(self, outputs: Sequence[_Output]) -> None:
        super().__init__()
        self._left: Iterator[_Output] = iter(outputs)

    def once(self, compute: Callable[[], Tensor], device: torch.device, *, draws: bool) -> Any:  # noqa: ARG002
        return self._next(_IN_CHUNKS, device)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_kept(func, args):
            return func(*args, **(kwargs or {}))
        return self._next(func, args[0].device)

    def _next(self, kernel: Any, device: torch.device) -> Any:
        """Return the next saved result, which must be that of `kernel`."""
        kept = next(self._left, None)
        if kept is None or kept.kernel is not kernel:
            raise LookupError(f"it ran {kernel} where its first run did not")  # `BothRuns` names the block
        if kept.noise is not None:
            _set_noise(device, kept.noise)
        return _aliases(kept.result)


def _is_kept(func: Any, args: Sequence[Any]) -> bool:
    return func in attention_kernels() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0))


def generator_state(device: torch.device) -> Tensor:
    """Return the state of a device's default generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_noise(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def restored(device: torch.device, state: Tensor | None) -> Iterator[None]:
    """Set a device's default generator to `state` inside the block; None leaves it as it is."""
    if state is None:
        yield
        return
    current = generator_state(device)
    _set_noise(device, state)
    try:
        yield
    finally:
        _set_noise(device, current)


def _aliases(result: Any) -> Any:
    """Return new tensors over the same bytes.

    Autograd writes its history to the tensors that it receives.
    """
    return tree_map_only(Tensor, Tensor.detach, result)
