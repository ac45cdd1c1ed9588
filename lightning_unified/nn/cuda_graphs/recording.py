"""Two CUDA graphs for one input shape, forward and backward, as one autograd function."""

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from typing_extensions import override

from lightning_unified.nn.compiled import compiled_inside
from lightning_unified.nn.cuda_graphs.gradient_buffer import GradientBuffer, differentiate, leave_place

__all__ = ["Call", "Recording", "Turn", "UnrecordableError", "call_of", "record", "recording_stream"]

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of one call of a network.

    Attributes:
        key: Shapes, dtypes, autocast and constants; calls with equal keys share one recording.
        values: Positional arguments, then keyword arguments.
        names: Names of the keyword arguments.
        autocast: Whether autocast is on, and its dtype.
    """

    key: Hashable
    values: tuple[Any, ...]
    names: tuple[str, ...]
    autocast: tuple[bool, torch.dtype]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the values."""
        return [value for value in self.values if isinstance(value, Tensor)]

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(one.numel() for one in self.tensors)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments."""
        first = len(self.values) - len(self.names)
        return self.values[:first], dict(zip(self.names, self.values[first:], strict=True))

    def example(self) -> "Call":
        """Return a copy with its own tensors, from which a recording reads."""
        own = (
            value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in self.values
        )
        return Call(key=self.key, values=tuple(own), names=self.names, autocast=self.autocast)


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any], *, device: torch.device) -> Call | None:
    """Return the call, or None if it cannot be recorded.

    A call needs at least one tensor. Its arguments must be plain tensors on `device`, or constants.
    """
    values = (*args, *kwargs.values())
    kinds: list[Any] = []
    for value in values:
        if type(value) is Tensor and value.device == device:
            kinds.append((value.shape, value.dtype, value.requires_grad))
        elif type(value) in _CONSTANTS:
            kinds.append((type(value), value))
        else:
            return None
    if not any(isinstance(value, Tensor) for value in values):
        return None
    names = tuple(kwargs)
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return Call(key=(names, tuple(kinds), autocast), values=values, names=names, autocast=autocast)


class UnrecordableError(Exception):
    """A compiled part waits for the device, so that it cannot be recorded."""


class Turn:
    """A replayed forward pass that waits for its backward pass."""

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Two graphs and the tensors that they read and write.

    Attributes:
        forward: Reads `inputs`, writes `outputs`.
        backward: Reads `incoming`, adds to `buffer` and writes `of_inputs`.
        inputs: Tensors to which a call's tensors are copied.
        outputs: The tensors in the network's returned value.
        structure: The tree of the returned value, with everything but tensors.
        incoming: Gradients of the outputs, None for an output without one.
        buffer: The gradient buffer, shared with other recordings.
        used: Whether the backward pass writes each parameter's gradient.
        of_inputs: Gradients of the inputs; None for an input without one.
        written: Buffers that the forward pass writes.
    """

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]
    structure: tuple[list[Any], Any]
    incoming: list[Tensor | None]
    buffer: GradientBuffer
    used: list[bool]
    of_inputs: list[Tensor | None]
    written: list[Tensor]

    def replay(self, given: Sequence[Tensor], *, turn: Turn) -> Any:
        """Replay the forward pass for `given` and return its outputs as copies."""
        results = iter(_Replay.apply(self, turn, *given, *self.buffer.parameters.values()))
        leaves, spec = self.structure
        return tree_unflatten([next(results) if leaf is _TENSOR else leaf for leaf in leaves], spec)


_TENSOR = object()


class _Replay(torch.autograd.Function):
    """A recording as an autograd function.

    Its parameters are arguments, so that their hooks run and `.grad` accumulates.
    """

    @staticmethod
    @override
    def forward(ctx: Any, recording: Recording, turn: Turn, *tensors: Tensor) -> tuple[Tensor, ...]:
        for own, given in zip(recording.inputs, tensors, strict=False):
            own.copy_(given)
        recording.forward.replay()
        if recording.written:
            torch.autograd.graph.increment_version(recording.written)  # a replay writes past the counters
        ctx.recording, ctx.turn = recording, turn
        results = tuple(output.clone() for output in recording.outputs)
        ctx.mark_non_differentiable(
            *(one for one, incoming in zip(results, recording.incoming, strict=True) if incoming is None)
        )
        return results

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        recording, turn = ctx.recording, ctx.turn
        if turn.over:
            raise RuntimeError(
                "the backward pass of a recorded step was called a second time, and the first one has overwritten its tensors: take the "
                "network out of CudaGraphs (of=…) if its graph must be kept."
            )
        turn.over = True
        for own, given in zip(recording.incoming, grads, strict=True):
            if own is not None:
                own.copy_(given)
        of_parameters = recording.buffer.receive(recording.backward.replay, used=recording.used)
        of_inputs = (None if one is None else one.clone() for one in recording.of_inputs)
        return (None, None, *of_inputs, *of_parameters)


def record(
    network: nn.Module, call: Call, *, buffer: GradientBuffer, written: Sequence[Tensor], pool: Any
) -> Recording:
    """Record `network` called with `call`; replays read the tensors of `call`.

    The recording computes nothing. Leaves over the same memory replace the parameters: autograd would accumulate the parameters'
    gradients on the streams of earlier eager passes. A recording must not wait for these streams. Autocast keeps no casts between
    calls, since a recording's casts lie in its own memory.

    A network with compiled parts is rehearsed before, because torch's compiler may not compile in a recording.

    Args:
        network: In train mode, on a CUDA device.
        call: An `example`.
        buffer: The gradient buffer.
        written: Buffers that the forward pass writes.
        pool: The memory pool, shared by recordings that never interleave.

    Raises:
        torch.OutOfMemoryError: If memory runs out, with nothing left behind.
        UnrecordableError: If a compiled part waits for the device.
    """
    inputs, device = call.tensors, call.tensors[0].device
    # of torch's own class for parameters, which guards of compiled parts ask for
    leaves: dict[str, Tensor] = {name: nn.Parameter(one.detach()) for name, one in buffer.parameters.items()}
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    stream, (on, dtype) = recording_stream(device), call.autocast
    settings: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    wanted = [one for one in inputs if one.requires_grad]

    def compute() -> Any:
        args, kwargs = call.arguments()
        with _casts_kept_inside(device, dtype, on=on):
            return torch.func.functional_call(network, leaves, args, kwargs)

    # the outer stream context holds even where the end of a recording raises; torch.cuda.graph leaves its own stream set then
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.enable_grad(), _no_collection():
        if compiled_inside(network):
            with torch.random.fork_rng([device]), _unchanged(written):
                for may_wait in (True, False):  # the first call may compile, and wait for it
                    _rehearse(compute, leaves=leaves, inputs=wanted, buffer=buffer, may_wait=may_wait)
        with torch.cuda.graph(forward, **settings):
            result = compute()
        flat, spec = tree_flatten(result)
        outputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        incoming = [torch.zeros_like(one) if one.requires_grad else None for one in outputs]
        with torch.cuda.graph(backward, **settings):
            used, of_inputs = differentiate(outputs, leaves=leaves, inputs=wanted, incoming=incoming, buffer=buffer)
    left = iter(of_inputs)
    return Recording(
        forward=forward,
        backward=backward,
        inputs=inputs,
        outputs=[one.detach() for one in outputs],
        structure=([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat], spec),
        incoming=incoming,
        buffer=buffer,
        used=used,
        of_inputs=[next(left) if one.requires_grad else None for one in inputs],
        written=list(written),
    )


def _rehearse(
    compute: Callable[[], Any],
    *,
    leaves: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    buffer: GradientBuffer,
    may_wait: bool,
) -> None:
    """Run both passes once and keep nothing of them.

    Raises:
        UnrecordableError: If the passes wait for the device although `may_wait` is False.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(before if may_wait else "error")
    try:
        outputs = [leaf for leaf in tree_leaves(compute()) if isinstance(leaf, Tensor)]
        incoming = [torch.zeros_like(one) if one.requires_grad else None for one in outputs]
        differentiate(outputs, leaves=leaves, inputs=inputs, incoming=incoming, buffer=buffer, put=leave_place)
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise UnrecordableError from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _casts_kept_inside(device: torch.device, dtype: torch.dtype, *, on: bool) -> Iterator[None]:
    """Run under autocast, and forget its casts of weights at the end.

    The outer autocast's setting of the cache holds, because compiled parts are compiled for it.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, dtype, enabled=on, cache_enabled=torch.is_autocast_cache_enabled()):
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of tensors at the end."""
    before = [one.clone() for one in tensors]
    try:
        yield
    finally:
        for one, value in zip(tensors, before, strict=True):
            one.copy_(value)


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of all recordings on a device.

    One stream saves memory: cuBLAS keeps a workspace of some MiB for each stream. A small product takes the workspaces here, one
    for this thread and one for autograd's. Otherwise the first recording would hold them in its pool, which could not be freed
    then, and an earlier plan would not count them.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.enable_grad():
        x = torch.ones(8, 8, device=device, requires_grad=True)
        (x @ x).sum().backward()
    return stream


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: no device memory may be freed in the middle of a recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
