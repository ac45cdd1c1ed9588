"""Memory inside `torch.nn.functional.linear_cross_entropy` in chunks (torch 2.13).

The loss is one operation, whose fake run shows its results only. It allocates one chunk of logits and reuses it for all
chunks of rows. Beside it live the rows of the weight that a chunk's labels select, and for all rows the labels, the mask and
the weights of the losses. A CPU widens half-precision operands.

Source: `_ChunkContext` in torch's nn/modules/linear_cross_entropy.py. The formula equals the CPU's allocations in float32
(tests); half precision follows the source.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.kernel_memory.calls import Call

__all__ = ["chunk_of_gradients", "chunk_of_losses"]

_LABEL, _MASK = 8, 1  # bytes


class _Sizes(NamedTuple):
    """Sizes of one call: entries of logits, inputs, weight and rows, and bytes of an entry."""

    logits: int
    inputs: int
    weight: int
    rows: int
    chunk: int
    item: int
    wide: int


def chunk_of_gradients(call: Call) -> tuple[int, ...]:
    """Return the blocks of the operation that sums the losses and computes their gradients."""
    sizes = _sizes(call.args[0], call.args[1], rows=call.args[8], dtype=call.args[10])
    inputs, weight = call.args[12], call.args[13]
    blocks = [*_of_losses(sizes), sizes.chunk * sizes.wide]
    if inputs:
        blocks.append(sizes.inputs * sizes.wide)
    if weight and call.args[9] != "compact":
        blocks.append(sizes.weight * sizes.wide)
    if sizes.wide > sizes.item:
        blocks += [sizes.weight * sizes.wide, sizes.inputs * sizes.wide * (1 + bool(inputs))]
    return tuple(blocks)


def chunk_of_losses(call: Call) -> tuple[int, ...]:
    """Return the blocks of the operation that computes each row's loss, without gradients."""
    sizes = _sizes(call.args[0], call.args[1], rows=call.args[6], dtype=call.args[8])
    blocks = [*_of_losses(sizes), 2 * sizes.chunk * sizes.wide]
    if sizes.wide > sizes.item:
        blocks.append(sizes.weight * sizes.wide)
    return tuple(blocks)


def _of_losses(sizes: _Sizes) -> tuple[int, ...]:
    return sizes.logits * sizes.wide, sizes.chunk * sizes.wide, sizes.rows * (_LABEL + _MASK + sizes.wide)


def _sizes(source: Tensor, weight: Tensor, *, rows: int, dtype: torch.dtype) -> _Sizes:
    classes, width = weight.shape
    item = source.element_size()
    chunk = min(rows, source.shape[0])
    return _Sizes(
        logits=rows * classes,
        inputs=chunk * width,
        weight=weight.numel(),
        rows=source.shape[0],
        chunk=rows,
        item=item,
        wide=max(item, dtype.itemsize),
    )
