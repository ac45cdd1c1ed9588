"""One shape's forward and backward pass as two CUDA graphs, and their replay as one step of autograd."""

import gc
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_unified.nn.cuda_graphs.gradient_buffer import GradientRoom, differentiate

__all__ = ["Call", "Recording", "Turn", "call_of", "record", "recording_stream"]

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a network is called with.

    Attributes:
        key: Equal for calls that one recording serves: shapes, dtypes, autocast and all that is no tensor.
        values: Positional arguments, then those by name.
        names: Of the latter.
        autocast: Whether it is on, and its dtype.
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
        """Of all its tensors."""
        return sum(one.numel() for one in self.tensors)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the network takes."""
        first = len(self.values) - len(self.names)
        return self.values[:first], dict(zip(self.names, self.values[first:], strict=True))

    def example(self) -> "Call":
        """Return the same with tensors of its own, which a recording reads."""
        own = (
            value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in self.values
        )
        return Call(key=self.key, values=tuple(own), names=self.names, autocast=self.autocast)


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any], *, device: torch.device) -> Call | None:
    """Return the call; None if there is no tensor, or an argument is neither a plain one on `device` nor a plain constant."""
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


class Turn:
    """A replayed forward pass, from then until its backward pass has run or nobody can ask for it any more."""

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Two graphs and the tensors that they read and write.

    Attributes:
        forward: Reads `inputs`, writes `outputs`.
        backward: Reads `incoming`, adds to `room` and writes `of_inputs`.
        inputs: Where a call's tensors go.
        outputs: The tensors of what the network returns.
        structure: How it returns them, with all that is no tensor.
        incoming: Gradients of the outputs, None for one that has none.
        room: Where the gradients of the trained parameters are, shared with other recordings.
        used: Which of them the backward pass writes.
        of_inputs: Gradients of the inputs; None for one that has none.
        written: Buffers that the forward pass writes.
    """

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]
    structure: tuple[list[Any], Any]
    incoming: list[Tensor | None]
    room: GradientRoom
    used: list[bool]
    of_inputs: list[Tensor | None]
    written: list[Tensor]

    def replay(self, given: Sequence[Tensor], *, turn: Turn) -> Any:
        """Return what the network returns for `given`, in tensors of their own."""
        results = iter(_Replay.apply(self, turn, *given, *self.room.parameters.values()))
        leaves, spec = self.structure
        return tree_unflatten([next(results) if leaf is _TENSOR else leaf for leaf in leaves], spec)


_TENSOR = object()


class _Replay(torch.autograd.Function):
    """Autograd's view of a recording: its parameters are arguments, so that their hooks and `.grad` are served as ever."""

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
                "the backward pass of a recorded step was asked for a second time, and what it needs is overwritten by the first: take the "
                "network out of CudaGraphs (of=…) if its graph must be kept."
            )
        turn.over = True
        for own, given in zip(recording.incoming, grads, strict=True):
            if own is not None:
                own.copy_(given)
        of_parameters = recording.room.receive(recording.backward.replay, used=recording.used)
        of_inputs = (None if one is None else one.clone() for one in recording.of_inputs)
        return (None, None, *of_inputs, *of_parameters)


def record(
    network: nn.Module,
    call: Call,
    *,
    room: GradientRoom,
    written: Sequence[Tensor],
    pool: Any,
) -> Recording:
    """Return the recording of `network` called with `call`, whose tensors are those it will read.

    Nothing is computed. The parameters are stood in for by leaves over the same memory, since autograd would run the accumulation
    of gradients on the streams of earlier eager passes, which no recording may wait for. Autocast keeps no casts between calls:
    those of a recording are in its memory.

    Args:
        network: In train mode, on a CUDA device.
        call: An `example`.
        room: Where the gradients of the trained parameters go.
        written: Buffers that the forward pass writes.
        pool: Of memory, of recordings that do not run interleaved.

    Raises:
        torch.OutOfMemoryError: If memory runs out, with nothing left behind.
    """
    inputs, device = call.tensors, call.tensors[0].device
    leaves = {name: one.detach().requires_grad_() for name, one in room.parameters.items()}
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    stream, (on, dtype) = recording_stream(device), call.autocast
    settings: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    args, kwargs = call.arguments()
    # the outer stream context stands even where the end of a recording raises, which torch.cuda.graph does not live through
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.enable_grad(), _no_collection():
        with (
            torch.autocast(device.type, dtype, enabled=on, cache_enabled=False),
            torch.cuda.graph(forward, **settings),
        ):
            result = torch.func.functional_call(network, leaves, args, kwargs)
        flat, spec = tree_flatten(result)
        outputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        incoming = [torch.zeros_like(one) if one.requires_grad else None for one in outputs]
        wanted = [one for one in inputs if one.requires_grad]
        with torch.cuda.graph(backward, **settings):
            used, of_inputs = differentiate(outputs, leaves=leaves, inputs=wanted, incoming=incoming, room=room)
    left = iter(of_inputs)
    return Recording(
        forward=forward,
        backward=backward,
        inputs=inputs,
        outputs=[one.detach() for one in outputs],
        structure=([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat], spec),
        incoming=incoming,
        room=room,
        used=used,
        of_inputs=[next(left) if one.requires_grad else None for one in inputs],
        written=list(written),
    )


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all recordings on a device, one for good: cuBLAS keeps a workspace for each stream it ever ran on.

    Some MiB, which it takes here, once for this thread and once for autograd's: the first recording would have them in its pool, which
    could not be given back then, and a plan that is made before would not know of them.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.enable_grad():
        x = torch.ones(8, 8, device=device, requires_grad=True)
        (x @ x).sum().backward()
    return stream


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave cycles alone meanwhile: what they hold of the device must not be given back in the middle of a recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
