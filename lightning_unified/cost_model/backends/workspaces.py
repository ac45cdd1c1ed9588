"""Workspaces of matrix libraries: memory of the CUDA caching allocator outside of tensors.

A cuBLAS handle takes its workspace at its first product, after the result, and keeps it. The thread of the forward pass has
one handle, the thread of the backward pass another. cublasLt, which runs products with a fused bias, keeps a small workspace
of its own for each thread. The backward thread runs such products if blocks are recomputed.

| library | workspace a thread | source |
|---|---|---|
| cuBLAS on Hopper | 32 MiB | H200, torch 2.11 |
| cuBLAS on other generations | 8.1 MiB | torch's sources, not run |
| cublasLt | 1 MiB | H200, torch 2.11 |
| hipBLAS | 32 MiB | torch's sources, not run |
| hipBLASLt | 76 MiB | torch's sources, not run |

The sources are torch's `CublasHandlePool.cpp` and `CUDABlas.cpp`. On the H200, `CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8` gives 8.1 MiB, `:16:8` 0.125 MiB and `:0:0` nothing.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightning_unified.cost_model.backends.device import generation as generation_here
from lightning_unified.cost_model.backends.reductions import with_sums
from lightning_unified.cost_model.trace.trace import Event, Take, Trace, Work

__all__ = ["cublas_bytes", "with_workspaces"]

_KIB = 2**10
_LARGE = 4096 * 8 * _KIB
_SMALL = 4096 * 2 * _KIB + 16 * 8 * _KIB
_LARGE_GENERATIONS = {9}  # Hopper; later torch releases added other generations
_LT_KIB = {"cuda": 1024, "rocm": 76 * 1024}
_PRODUCTS = re.compile(
    r"^aten\.(mm|bmm|addmm|baddbmm|addbmm|_addmm_activation|mv|addmv|dot|vdot|linear|matmul|_grouped_mm|_euclidean_dist)\b"
)
_WITH_BIAS = re.compile(r"^aten\.(addmm|_addmm_activation|linear)\b")


def with_workspaces(
    trace: Trace, *, environment: Mapping[str, str] | None = None, generation: int | None = None
) -> Trace:
    """Return the trace with library workspaces and the buffers of its sums.

    Workspaces live from the trace's start: the first step of a run takes them, later steps find them.

    Args:
        trace: Trace of a step; one of another backend than CUDA or ROCm is returned unchanged.
        environment: Environment variables that set the sizes; None for those of this process.
        generation: Major compute capability of the device; None queries the device of this process, and takes Hopper's
            without one.
    """
    if trace.backend not in _LT_KIB:
        return trace
    trace = with_sums(trace)
    environment = os.environ if environment is None else environment
    free = max((event.storage for event in trace.events if isinstance(event, Take)), default=-1) + 1
    found = ((size, since) for size, since in _sizes(trace, environment, generation) if size)
    taken: list[Event] = [
        Take(free + index, size, "workspaces", since=since) for index, (size, since) in enumerate(found)
    ]
    return replace(trace, events=(*taken, *trace.events)) if taken else trace


def _sizes(trace: Trace, environment: Mapping[str, str], generation: int | None) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each workspace with the index of the first operation that needs it.

    Operations in CUDA graphs use the workspace of the stream of recordings, which is no part of the step.
    """
    works = [event for event in trace.events if isinstance(event, Work) and event.phase != "setup"]
    eager = [(at, event) for at, event in enumerate(works) if not trace.is_replayed(event)]
    for in_backward in (False, True):
        own = [(at, event.op) for at, event in eager if (event.phase == "backward") is in_backward]
        product = next((at for at, op in own if _PRODUCTS.match(op)), None)
        with_bias = next((at for at, op in own if _WITH_BIAS.match(op)), None)
        if product is not None:
            yield cublas_bytes(trace.backend, environment=environment, generation=generation), product
        if with_bias is not None:
            yield _lt_bytes(trace.backend, environment), with_bias


def cublas_bytes(backend: str, *, environment: Mapping[str, str], generation: int | None = None) -> int:
    """Return the bytes of one handle's workspace.

    Args:
        backend: `"cuda"` or `"rocm"`.
        environment: `CUBLAS_WORKSPACE_CONFIG` holds pairs of `:KiB:count`; an unreadable value leaves the default, as in
            torch.
        generation: As in `with_workspaces`.
    """
    names = ["CUBLAS_WORKSPACE_CONFIG"]
    if backend == "rocm":
        names += ["HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG"]
    config = next((environment[name] for name in names if name in environment), "")
    pairs = re.findall(r":(\d+):(\d+)", config)
    if pairs:
        return sum(int(size) * int(count) * _KIB for size, count in pairs)
    if backend == "rocm":
        return _LARGE
    return _LARGE if (generation_here() if generation is None else generation) in _LARGE_GENERATIONS else _SMALL


def _lt_bytes(backend: str, environment: Mapping[str, str]) -> int:
    names = ["CUBLASLT_WORKSPACE_SIZE"] + ["HIPBLASLT_WORKSPACE_SIZE"] * (backend == "rocm")
    config = next((environment[name] for name in names if name in environment), "")
    return (int(config) if config.isdigit() else _LT_KIB[backend]) * _KIB
