"""Memory inside CUDA kernels, taken from the caching allocator.

All formulas follow torch's sources, which allocate these buffers with `at::empty`; convolutions are judgement. Each function
names the allocations of an H200 under torch 2.11 that confirm it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.device import multiprocessors
from lightning_unified.cost_model.backends.kernel_memory.calls import (
    BACK,
    FLOAT,
    HALF,
    RESULT,
    Call,
    Order,
    Repair,
    byte_count,
    rounded_up,
)
from lightning_unified.cost_model.backends.kernel_memory.convolution import cuda_convolution, cuda_convolution_backward

__all__ = ["CUDA_TEMPORARIES"]

_LONG = 8
_EMBEDDING_SORTS_ABOVE = 3072
_EMBEDDING_ROWS_A_THREAD = 10
_SORT_IN_PLACE_UP_TO = 4096
_BESIDE = 256  # bytes of cuDNN's workspace beyond its accumulators
_BLOCK = 64  # queries, and entries of a head, of a block in the efficient kernel's backward pass
_LOCK_BYTES = 16
_TOPK_BLOCKS = ((19, 20_000), (40, 10_000), (79, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
"""Most rows, and least entries of a row, that `topk` searches in blocks; 400 entries for more rows."""
_TOPK_DIGITS, _TOPK_THREADS, _TOPK_BLOCKS_A_MULTIPROCESSOR = 256, 256, 6


def _flash_backward(call: Call) -> int:
    """Return the bytes of the float32 gradient of queries, and of expanded keys and values.

    Grouped keys and values are expanded.

    Queries are rounded up to 128 and head entries to 32; each query adds one float32.

    Source: `mha_bwd` in flash-attention's `flash_api.cpp`, as torch ships it. cuDNN's kernel has the same accumulator.
    """
    query, key = call.args[1], call.args[2]
    rows, heads, queries, size = query.shape
    accumulated = rows * heads * rounded_up(queries, 128) * FLOAT
    spread = 2 * rows * heads * key.shape[2] * size * query.element_size() if key.shape[1] != heads else 0
    return accumulated * (rounded_up(size, 32) + 1) + spread


def _cudnn_backward(call: Call) -> tuple[int, ...]:
    """Return the blocks of flash without rounding, and a copy of the output's gradient.

    The copy is made unless the gradient has the output's memory layout.

    Source: an H200's allocations under torch 2.11; the copy follows torch's `cudnn/MHA.cpp`.
    """
    gradient, query, key, output = call.args[0], call.args[1], call.args[2], call.args[4]
    rows, heads, queries, size = query.shape
    accumulated = rows * heads * queries * FLOAT * (size + 1)
    if key.shape[1] != heads:
        accumulated += 2 * rows * heads * key.shape[2] * size * query.element_size()
    return 0 if gradient.stride() == output.stride() else byte_count(gradient), accumulated + _BESIDE


def _efficient_backward(call: Call) -> Order:
    """Return the blocks of the efficient kernel's backward pass.

    These are: a copy of the output's gradient unless it lies position by position; the product of output and its gradient,
    given back once it is summed to a float32 a query; the queries' gradient in blocks, each with a lock. Half precision has
    no such product.

    Source: `_efficient_attention_backward` in torch's `transformers/cuda/attention_backward.cu`, `GradQTempStorage` in its
    `mem_eff_attention/kernel_backward.h`; in float32 an H200's allocations under torch 2.11.
    """
    gradient, query, value = call.args[0], call.args[1], call.args[3]
    rows, heads, queries, size = query.shape
    a_query = rows * heads * queries * FLOAT
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else byte_count(gradient)
    if query.dtype in HALF:
        return copied, a_query, rows * heads * rounded_up(queries, 64) * rounded_up(size, 64) * FLOAT
    blocks = rows * heads * -(-queries // _BLOCK) * -(-size // _BLOCK)
    product = (a_query * value.shape[-1], a_query, BACK, BACK)
    return copied, a_query, *product, blocks * (_BLOCK * _BLOCK * FLOAT + _LOCK_BYTES)


def _embedding_backward(call: Call) -> tuple[int, ...]:
    """Return sorted indices with sort buffers, six lists of segments, and float32 partial sums.

    Source: `embedding_dense_backward_cuda` and `EmbeddingBackwardKernel.cu` of torch; up to 3,072 indices are added in place.
    """
    gradient, indices, vocabulary = call.args[0], call.args[1], call.args[2]
    count, width = indices.numel(), gradient.shape[-1]
    if count <= _EMBEDDING_SORTS_ABOVE:
        return ()
    partial = count // _EMBEDDING_ROWS_A_THREAD + min(count, vocabulary)
    return *[count * _LONG] * 5, partial * _LONG, partial * width * max(gradient.element_size(), FLOAT)


def _accumulating_put(call: Call) -> tuple[int, ...]:
    """Return the blocks of an accumulating `index_put`.

    These are linear and sorted indices, their order and radix-sort buffers: six lists of the rows added. Non-contiguous
    values are copied.

    Source: `index_put_with_sort_kernel` in torch's `cuda/Indexing.cu`; an H200's allocations confirm it.
    """
    accumulates, indices = call.args[3], [each for each in call.args[1] if isinstance(each, Tensor)]
    if not accumulates or not indices:
        return ()
    values, a_list = call.args[2], _LONG * max(each.numel() for each in indices)
    return a_list, 0 if values.is_contiguous() else byte_count(values), *[a_list] * 3, 2 * a_list


def _softmax_backward(call: Call) -> int:
    """Return the bytes of the product of gradient and result, which is summed along the row.

    Source: `softmax_backward_cuda_out` in torch's `cuda/SoftMax.cu`.
    """
    return max(byte_count(call.args[0]), byte_count(call.args[1]))


def _in_a_row(call: Call) -> int:
    """Return the bytes of a copy of the gradient, unless it is contiguous.

    Source: the backward passes of torch's `cuda/UpSample*.cu`.
    """
    return 0 if call.args[0].is_contiguous() else byte_count(call.args[0])


def _sort(call: Call) -> int:
    """Return the bytes of copied keys and indices, for rows too long to sort in shared memory.

    Source: judgement from torch's `cuda/Sort.cpp`.
    """
    source = call.args[0]
    longest = max(source.shape, default=1)
    return source.numel() * (source.element_size() + _LONG) if longest > _SORT_IN_PLACE_UP_TO else 0


def _topk(call: Call) -> Order:
    """Return the counts of digits by which blocks search many rows at once.

    These are two tables of 256 entries for each block and row.

    Source: `should_use_multiblock`, `get_items_per_thread` and `launch` in torch's `cuda/TensorTopK.cu`; an H200's allocations
    confirm it for one block a row.
    """
    source, dim = call.args[0], call.args[2]
    length = source.shape[dim] if source.dim() else 1
    rows = source.numel() // max(length, 1)
    if length < next((least for most, least in _TOPK_BLOCKS if rows <= most), 400):
        return ()
    items = -(-length * rows // (multiprocessors() * _TOPK_BLOCKS_A_MULTIPROCESSOR * _TOPK_THREADS))
    blocks = -(-length // (_TOPK_THREADS * min(max(items, 4), 64)))
    digits = rows * blocks * _TOPK_DIGITS
    return RESULT, RESULT, 2 * digits, FLOAT * digits


def _euclidean_distances(call: Call) -> Order:
    """Return the squares of both operands, then both with two more columns.

    The latter live while the product is computed.

    Source: `_euclidean_dist` in torch's `native/Distance.cpp`; an H200's allocations confirm it.
    """
    squares, wide = [], []
    for each in call.args[:2]:
        columns = max(each.shape[-1], 1)
        squares += [byte_count(each), BACK]
        wide.append(byte_count(each) // columns * (columns + 2))
    return *squares, byte_count(call.args[0]) + wide[0], BACK, *wide, RESULT


def _converted(call: Call) -> Order:
    """Return the bytes of a copy of the input in the result's dtype.

    Sums read half precision without a copy.

    Source: `make_reduction_from_ty` and `impl_func_cum_ops` in torch's `native/ReduceOps.cpp`; an H200's allocations of sums of
    booleans.
    """
    source, result = call.args[0], call.results[0]
    same = source.dtype is result.dtype
    return () if same else (RESULT, source.numel() * result.element_size())


def _summed(call: Call) -> Order:
    lowered = call.args[0].dtype in HALF and call.results[0].dtype is torch.float32
    return () if lowered else _converted(call)


_UPSAMPLED = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")

CUDA_TEMPORARIES: Mapping[str, Repair] = {
    **{f"aten.upsample_{name}_backward": _in_a_row for name in _UPSAMPLED},
    "aten._scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten._scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten._softmax_backward_data": _softmax_backward,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten._index_put_impl_": _accumulating_put,
    "aten.index_put": _accumulating_put,
    "aten.index_put_": _accumulating_put,
    "aten.sort": _sort,
    "aten.topk": _topk,
    "aten._euclidean_dist": _euclidean_distances,
    "aten.sum": _summed,
    "aten.prod": _summed,
    "aten.cumsum": _converted,
    "aten.cumprod": _converted,
    "aten.convolution": cuda_convolution,
    "aten.convolution_backward": cuda_convolution_backward,
}
