"""Workspaces of the matrix libraries: memory of the CUDA caching allocator that belongs to no tensor.

A cuBLAS handle takes its workspace at its first product, after the result, and keeps it; the thread that runs forward has one handle, the
thread that runs backward another. cublasLt, which runs a product with a fused bias, keeps a small one of its own, again one a thread: the
one that runs backward has such products where blocks are recomputed.

Measured on an H200 with torch 2.11: 32 MiB a thread, 1 MiB for cublasLt; `CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8` makes it 8.1 MiB,
`:16:8` 0.125 MiB, `:0:0` nothing. From torch's `CublasHandlePool.cpp` and `CUDABlas.cpp`, not run: other generations, and ROCm's 32 MiB
(hipBLAS) and 76 MiB (hipBLASLt).
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
_LARGE_GENERATIONS = {9}  # Hopper; others gained it in releases after those measured
_LT_KIB = {"cuda": 1024, "rocm": 76 * 1024}
_PRODUCTS = re.compile(r"^aten\.(mm|bmm|addmm|baddbmm|addbmm|_addmm_activation|mv|addmv|dot|vdot|linear|matmul)\b")
_WITH_BIAS = re.compile(r"^aten\.(addmm|_addmm_activation|linear)\b")


def with_workspaces(
    trace: Trace, *, environment: Mapping[str, str] | None = None, generation: int | None = None
) -> Trace:
    """Return the trace with the workspaces its products take, as storages that live from its start: the first step took them.

    The buffers of its sums are put in as well, where they are taken.

    Args:
        trace: Of a step; one of another backend than CUDA or ROCm is returned as it is.
        environment: Variables that set the sizes; None for those of this process.
        generation: Major compute capability of the device; None asks the device of this process, and without one takes Hopper's.
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
    """Yield each workspace's bytes with the operation of the step that first needs it."""
    works = [event for event in trace.events if isinstance(event, Work) and event.phase != "setup"]
    for in_backward in (False, True):
        own = [(at, event.op) for at, event in enumerate(works) if (event.phase == "backward") is in_backward]
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
        environment: `CUBLAS_WORKSPACE_CONFIG` is pairs of `:KiB:count`; one that cannot be read leaves the default, as in torch.
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
