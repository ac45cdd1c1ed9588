"""Buffers of CUDA sums: for few columns of many rows, several blocks share a column.

The blocks that share a column exchange their partial sums in device memory. Examples are the gradients of biases and of
broadcast weights. Partial sums are float32 for every input dtype. The size follows from rows, columns and number of
multiprocessors, in steps and up to a limit (132 MiB on an H200). It is no sum of monomials, so it is computed for the
requested size instead of interpolated.

Source: `setReduceConfig` and `global_memory_size` in torch's `native/cuda/Reduce.cuh`; equal to the byte with an H200's
allocations under torch 2.11. ROCm's code differs in constants, which are not modelled.
"""

from collections.abc import Iterator
from dataclasses import replace

from lightning_unified.cost_model.backends.device import multiprocessors
from lightning_unified.cost_model.trace.trace import Event, Give, Passes, Take, Trace, Work

__all__ = ["sum_bytes", "with_sums"]

_SUMS = ("aten.sum.dim_IntList", "aten.mean.dim")
_ENTRY_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FLOAT = 4
_THREADS, _WARP, _MOST_AT_ONCE = 512, 32, 4
_THREADS_A_MULTIPROCESSOR = 2048
_FEWEST, _MOST = 16, 256  # values summed by one thread


def with_sums(trace: Trace) -> Trace:
    """Return the trace with the buffers of its sums, which live only inside the kernels.

    Each buffer is taken after the kernel's result.

    A trace of another backend than CUDA or ROCm is returned unchanged.
    """
    if trace.backend not in ("cuda", "rocm"):
        return trace
    events = tuple(_with_buffers(trace.events))
    return trace if len(events) == len(trace.events) else replace(trace, events=events)


def _with_buffers(events: tuple[Event, ...]) -> Iterator[Event]:
    free = max((event.storage for event in events if isinstance(event, Take)), default=-1) + 1
    waiting = 0
    for event, following in zip(events, [*events[1:], None], strict=True):
        if isinstance(event, Work):
            waiting = _buffer(event)
        yield event
        if waiting and not isinstance(following, Take):
            yield from (Take(free, waiting, "temporaries"), Give(free))
            free, waiting = free + 1, 0


def _buffer(work: Work) -> int:
    """Return the bytes of a sum's buffer, 0 for another operation.

    A sum counts one flop an entry, and moves its entries and results. If the operation stands for many, the buffer is that of one of them.
    """
    if isinstance(work, Passes) and work.kernels:
        work = Work(work.op, work.phase, work.place, work.flops // work.kernels, work.moved // work.kernels, work.dtype)
    result = _ENTRY_BYTES.get(work.dtype)
    if result is None or not work.flops or work.op not in _SUMS:
        return 0
    columns = min(
        (left // result for entry in (2, 4) if (left := work.moved - entry * work.flops) > 0),
        default=0,
    )
    return sum_bytes(work.flops // columns, columns) if columns else 0


def sum_bytes(rows: int, columns: int) -> int:
    """Return the bytes of the buffer of a sum over `rows` rows of `columns` entries each.

    It is 0 if one block sums each column.
    """
    at_once = next(count for count in (_MOST_AT_ONCE, 2, 1) if columns % count == 0)
    threads = _THREADS // at_once
    wide, high = (_power_of_two(min(count, threads)) for count in (columns // at_once, rows))
    height = min(high, threads // min(wide, _WARP))
    width = min(wide, threads // height)
    values = -(-rows // height)
    target = multiprocessors() * (_THREADS_A_MULTIPROCESSOR // (width * height))
    grid = -(-(columns // at_once) // width)
    if rows < min(height * _FEWEST, _MOST) or values < _MOST or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // _FEWEST)), -(-values // _MOST))
    return _FLOAT * columns * blocks * width * at_once if blocks > 1 else 0


def _power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)
