"""Memory of a bfloat16 matrix product on a CPU: oneDNN packs blocks and sums in float32.

A block is 256 rows (or as many as divide the rows evenly), 512 deep and 64 columns wide. oneDNN also packs a first operand
that lies in columns, as in every weight's gradient. If such a product is deeper than a block, it keeps sums for up to 1024
columns. One thread takes at most 1.3 MiB, whatever the sizes. Each thread has its own blocks, except for the packed operand
and the sums of one block of rows.

Source: solved from two dozen shapes on one AVX-512 machine without matrix tiles (torch 2.13), which the formula reproduces to
the byte.
"""

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.kernel_memory.calls import Call

__all__ = ["packed_product"]

_ROWS, _DEPTH, _COLUMNS, _SUMMED_COLUMNS = 256, 512, 64, 1024
_HALF, _FLOAT = 2, 4
_PADDING = 32  # entries after a packed row of a whole block, against cache conflicts
_FEWEST = 16**3  # most multiplications without oneDNN (`use_mkldnn_bf16_matmul` in torch's native/mkldnn/Matmul.cpp)
_OWN = 1024  # bytes that every product takes
_OWN_PACKED = 128  # further bytes with a packed operand


def packed_product(call: Call) -> int:
    """Return the bytes of a product's blocks; its matrices are the call's last two tensors."""
    left, right = [each for each in call.args if isinstance(each, Tensor)][-2:]
    (rows, depth), columns = left.shape[-2:], right.shape[-1]
    if (
        left.dtype is not torch.bfloat16
        or rows * depth * columns <= _FEWEST
        or not torch.backends.mkldnn.is_available()
    ):
        return 0
    row_blocks, threads = -(-rows // _ROWS), torch.get_num_threads()
    rows, block = -(-rows // row_blocks), min(depth, _DEPTH)
    if left.stride(-2) != 1 or left.stride(-1) <= 1:
        block = block if depth <= 2 * _DEPTH else 2 * _DEPTH
        return threads * (block * _COLUMNS * _HALF + rows * _COLUMNS * _FLOAT + _OWN)
    packed = rows * (block + _PADDING * (block == _DEPTH)) * _HALF + _OWN_PACKED
    summed = rows * (_COLUMNS if depth <= _DEPTH else _summed(columns)) * _FLOAT
    return threads * (block * _COLUMNS * _HALF + _OWN) + min(threads, row_blocks) * (packed + summed)


def _summed(columns: int) -> int:
    """Return the columns summed at once: as many as divide them evenly, in whole blocks."""
    even = -(-columns // -(-columns // _SUMMED_COLUMNS))
    return -(-even // _COLUMNS) * _COLUMNS
