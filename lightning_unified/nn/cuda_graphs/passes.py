"""Run a network's passes on the stream of recordings, and rehearse them."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_unified.nn.cuda_graphs.addresses import graphs_exist
from lightning_unified.nn.cuda_graphs.calls import Call
from lightning_unified.nn.cuda_graphs.gradient_buffer import GradientBuffer, differentiate, leave_places

__all__ = ["Passes", "UnrecordableError", "free_workspaces", "recording_stream", "rehearse"]


class UnrecordableError(Exception):
    """A compiled part waits for the device, so that it cannot be recorded."""


class Passes:
    """Both passes of a network for one call.

    Leaves over the same memory replace the parameters: autograd would accumulate the parameters' gradients on the streams of earlier eager
    passes, and a recording must not wait for these streams. Autocast keeps no casts between calls, since a recording's casts lie in its own
    memory.
    """

    def __init__(self, network: nn.Module, call: Call, buffer: GradientBuffer) -> None:
        self._network, self._call, self._buffer = network, call, buffer
        self.device = call.tensors[0].device
        # of torch's own class for parameters, which guards of compiled parts ask for
        self._leaves: dict[str, Tensor] = {name: nn.Parameter(one.detach()) for name, one in buffer.parameters.items()}

    @contextmanager
    def on_their_stream(self) -> Iterator[None]:
        """Run on the stream of recordings inside the block.

        It ends with the block even where the end of a recording raises: `torch.cuda.graph` leaves its own stream set then.
        """
        stream = recording_stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream), torch.enable_grad(), _no_collection():
            yield

    def forward(self) -> Any:
        """Call the network on the leaves, and return what it returns."""
        args, kwargs = self._call.arguments()
        on, dtype = self._call.autocast
        with _casts_kept_inside(self.device, dtype, on=on):
            return torch.func.functional_call(self._network, self._leaves, args, kwargs)

    def backward(
        self,
        outputs: Sequence[Tensor],
        incoming: Sequence[Tensor | None],
        *,
        put: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
    ) -> tuple[list[bool], list[Tensor]]:
        """Run the backward pass as `differentiate` does, and return the same.

        It runs in this thread: autograd's own thread would need a workspace of its own.
        """
        wanted = [one for one in self._call.tensors if one.requires_grad]
        with torch.autograd.set_multithreading_enabled(False):
            return differentiate(
                outputs, leaves=self._leaves, inputs=wanted, incoming=incoming, buffer=self._buffer, put=put
            )

    def rehearse(self, *, may_wait: bool) -> None:
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
            outputs = [leaf for leaf in tree_leaves(self.forward()) if isinstance(leaf, Tensor)]
            incoming = [torch.zeros_like(one) if one.requires_grad else None for one in outputs]
            self.backward(outputs, incoming, put=leave_places)
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            raise UnrecordableError from error
        finally:
            torch.cuda.set_sync_debug_mode(before)


def rehearse(network: nn.Module, call: Call, *, buffer: GradientBuffer, written: Sequence[Tensor]) -> None:
    """Run both passes of `network` twice before `record`, and keep nothing of them.

    Torch's compiler may not compile in a recording. The first run may compile, and wait for the device meanwhile. Rehearse all calls before the
    first one is recorded: these runs use other memory than recordings do. The arguments are those of `record`.

    Raises:
        torch.OutOfMemoryError: If memory runs out.
        UnrecordableError: If a compiled part waits for the device.
    """
    passes = Passes(network, call, buffer)
    with passes.on_their_stream(), torch.random.fork_rng([passes.device]), _unchanged(written):
        passes.rehearse(may_wait=True)
        passes.rehearse(may_wait=False)


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

    One stream saves memory: cuBLAS keeps a workspace of some MiB for each stream. It is taken here. Otherwise the first recording would hold
    it in its pool, which could not be freed then, and an earlier plan would not count it.
    """
    stream = torch.cuda.Stream(device)
    _take_workspace(stream)
    return stream


def free_workspaces(device: torch.device) -> None:
    """Free the workspaces of cuBLAS that recordings do not use, if no CUDA graph exists.

    Eager passes take one for each of their two threads, and recorded passes need none of them. Graphs keep the addresses of
    workspaces, so that none may be freed while any graph of the process exists.
    """
    gc.collect()
    if graphs_exist():
        return
    stream = recording_stream(device)
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
    _take_workspace(stream)


def _take_workspace(stream: torch.cuda.Stream) -> None:
    """Let cuBLAS take its workspace for a stream and this thread, by a small product."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream), torch.no_grad():
        x = torch.ones(8, 8, device=stream.device)
        torch.mm(x, x)


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
