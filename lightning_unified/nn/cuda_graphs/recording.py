"""Two CUDA graphs for one input shape, forward and backward, as one autograd function."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_unified.nn.cuda_graphs.calls import Call
from lightning_unified.nn.cuda_graphs.gradient_buffer import GradientBuffer, add_to_places
from lightning_unified.nn.cuda_graphs.passes import Passes, recording_stream

__all__ = ["Recording", "Turn", "record"]


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

    The recording computes nothing. A network with compiled parts needs `rehearse` before.

    Args:
        network: In train mode, on a CUDA device.
        call: An `example`.
        buffer: The gradient buffer.
        written: Buffers that the forward pass writes.
        pool: The memory pool, shared by recordings that never interleave.

    Raises:
        torch.OutOfMemoryError: If memory runs out, with nothing left behind.
    """
    passes = Passes(network, call, buffer)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    stream = recording_stream(passes.device)
    settings: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    with passes.on_their_stream():
        with torch.cuda.graph(forward, **settings):
            result = passes.forward()
        flat, spec = tree_flatten(result)
        outputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        incoming = [torch.zeros_like(one) if one.requires_grad else None for one in outputs]
        # gradients that lie in the buffer already are not written by this
        with _unsafe_preserve_version_counter((*buffer.blocks,)), torch.cuda.graph(backward, **settings):
            used, of_inputs = passes.backward(outputs, incoming, put=add_to_places)
    left = iter(of_inputs)
    return Recording(
        forward=forward,
        backward=backward,
        inputs=call.tensors,
        outputs=[one.detach() for one in outputs],
        structure=([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat], spec),
        incoming=incoming,
        buffer=buffer,
        used=used,
        of_inputs=[next(left) if one.requires_grad else None for one in call.tensors],
        written=list(written),
    )
