"""Record decode steps as CUDA graphs, so that the device does not wait for Python between kernels."""

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["capture", "pool_bytes"]

_WARM_UP = 2  # the first call compiles and tunes, the second finds everything there


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all recordings: cuBLAS keeps a workspace of some 30 MiB for each stream that it was called on."""
    return torch.cuda.Stream(device)


def capture(step: Callable[[], None], *, state: Sequence[Tensor], pool: Any) -> torch.cuda.CUDAGraph:
    """Record `step`, which changes `state`, and leave `state` as it was.

    torch's own context manager collects garbage and gives cached memory back at each recording; here neither is wanted, for the
    loss pass would have to take that memory again. Only where a recording finds no room is it given back: the pool has to take new
    memory, and nothing can be freed while it records.

    Args:
        step: Runs one step on the current stream, reading and writing fixed tensors only.
        state: What a step changes, to be put back after each warm-up.
        pool: Where the graph's own memory comes from; graphs that never run at once share one.

    Raises:
        torch.OutOfMemoryError: If there is no room without cached memory either.
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
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # loader threads may pin memory meanwhile
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def pool_bytes(pool: Any) -> int:
    """Return the bytes that the allocator has taken of the device for a pool that graphs share.

    Args:
        pool: As `torch.cuda.graph_pool_handle` gives it.
    """
    return sum(
        one["total_size"] for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(pool)
    )
