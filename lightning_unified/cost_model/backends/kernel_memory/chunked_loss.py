"""What `torch.nn.functional.linear_cross_entropy` takes in chunks (torch 2.13): one operation, whose fake run shows the results alone.

A chunk of logits is made once and used for every chunk of rows, whatever their number; beside it live, for one chunk, the rows of the
weight that its labels name, and for all rows labels, mask and weights of the losses. Half-precision operands are widened on a CPU.
Source: `_ChunkContext` in torch's nn/modules/linear_cross_entropy.py; equal to what the CPU takes in float32 (tests), half precision from
the source.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.kernel_memory.calls import Call

__all__ = ["chunk_of_gradients", "chunk_of_losses"]

_LABEL, _MASK = 8, 1  # bytes


class _Sizes(NamedTuple):
    """Of one call: entries of a chunk's logits, inputs, of the weight, of all rows; and the widths they have."""

    logits: int
    inputs: int
    weight: int
    rows: int
    chunk: int
    item: int
    wide: int


def chunk_of_gradients(call: Call) -> tuple[int, ...]:
    """Return what the operation takes that sums the losses and computes their gradients at once."""
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
    """Return what the operation takes that computes each row's loss, and leaves gradients to the backward pass."""
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
