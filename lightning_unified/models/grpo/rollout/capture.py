"""A decode step recorded as a CUDA graph, so that the device does not wait for Python between its kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["capture"]

_WARM_UP = 2  # the first call compiles and tunes, the second finds everything there


def capture(step: Callable[[], None], *, state: Sequence[Tensor], pool: Any) -> torch.cuda.CUDAGraph:
    """Record `step`, which changes `state`, and leave `state` as it was.

    torch's own context manager collects garbage and gives cached memory back at each recording; here neither is wanted, for the
    loss pass would have to take that memory again.

    Args:
        step: Runs one step on the current stream, reading and writing fixed tensors only.
        state: What a step changes, to be put back after each warm-up.
        pool: Where the graph's own memory comes from; graphs that never run at once share one.
    """
    before = [one.clone() for one in state]

    def restore() -> None:
        for one, own in zip(state, before, strict=True):
            one.copy_(own)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
            restore()
        torch.cuda.synchronize()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # loader threads may pin memory meanwhile
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
