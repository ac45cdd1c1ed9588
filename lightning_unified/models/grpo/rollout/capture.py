"""Record decode steps as CUDA graphs: no wait for Python between kernels."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["capture", "new_pool", "pool_bytes", "refusing_waits"]

_WARM_UP = 2  # the first call compiles and tunes, the second uses the results


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all recordings: cuBLAS holds a workspace of about 30 MiB a stream."""
    return torch.cuda.Stream(device)


def capture(step: Callable[[], None], *, state: Sequence[Tensor], pool: Any) -> torch.cuda.CUDAGraph:
    """Record `step`, which changes `state`, and restore `state`.

    torch's own context manager collects garbage and empties the cache at each recording. The loss pass would then have to allocate
    that memory again. Here the cache is emptied only if a recording runs out of memory: the pool needs new memory, and nothing can be
    freed during a recording.

    Args:
        step: Runs one step on the current stream, reading and writing fixed tensors only.
        state: Tensors that a step changes; restored after each warm-up.
        pool: The graph's memory pool; graphs that never run at once share one.

    Raises:
        torch.OutOfMemoryError: If memory runs out with an empty cache too.
    """
    with contextlib.suppress(torch.OutOfMemoryError):
        return _recorded(step, state=state, pool=pool)
    torch.cuda.empty_cache()
    return _recorded(step, state=state, pool=pool)


def _recorded(step: Callable[[], None], *, state: Sequence[Tensor], pool: Any) -> torch.cuda.CUDAGraph:
    before = [one.clone() for one in state]

    def run() -> None:
        try:
            step()
        finally:
            for one, own in zip(state, before, strict=True):
                one.copy_(own)

    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run()
        torch.cuda.synchronize()
        graph.capture_begin(
            pool=pool, capture_error_mode="thread_local"
        )  # loader threads may pin memory during the capture
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@contextlib.contextmanager
def refusing_waits() -> Iterator[None]:
    """Let operations that wait for the device raise: a recording cannot contain them."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def new_pool() -> Any:
    """Return a memory pool for recordings."""
    return torch.cuda.graph_pool_handle()


def pool_bytes(pool: Any) -> int:
    """Return the device bytes of a pool that `new_pool` has returned."""
    return sum(
        one["total_size"] for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(pool)
    )
