"""The loss of a linear layer's logits, chunk by chunk, as two autograd functions.

`losses_of_rows` computes each chunk's logits in the forward pass and again in the backward pass. `summed_loss` computes them once: the
gradient of a sum is known but for one factor, so the forward pass computes it too, and the backward pass multiplies it by that factor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_unified.nn.cross_entropy.added_gradient import add_gradient
from lightning_unified.nn.cross_entropy.kernels import Kernels
from lightning_unified.nn.cross_entropy.row_parts import parts

__all__ = ["Chunks", "losses_of_rows", "summed_loss"]

_Found = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """The operands of a loss and their chunks.

    Args:
        hidden: The vectors (N, D).
        weight: The weight of the linear layer (V, D).
        bias: Its bias (V), if it has one.
        labels: The labels (N).
        rows: Rows of a chunk.
        dtype: The dtype of the products. The softmax and all sums have at least float32.
        kernels: The operations on a chunk of logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    rows: int
    dtype: torch.dtype
    kernels: Kernels

    @property
    def wide(self) -> torch.dtype:
        """The dtype of losses and sums."""
        return torch.promote_types(self.dtype, torch.float32)

    def parts(self) -> Iterator[slice]:
        """Return the rows of each chunk."""
        return parts(self.labels, self.rows)


def losses_of_rows(chunks: Chunks) -> Tensor:
    """Return each row's loss (N); the backward pass computes the logits again."""
    return _apply(_LossesOfRows, chunks)


def summed_loss(chunks: Chunks) -> Tensor:
    """Return the sum of the rows' losses, a scalar; the forward pass also computes its gradient."""
    return _apply(_SummedLoss, chunks)


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]  # a compiled backward pass of the chunks was wrong in torch 2.11
def _apply(function: type[torch.autograd.Function], chunks: Chunks) -> Tensor:
    how = (chunks.rows, chunks.dtype, chunks.kernels)
    return function.apply(chunks.hidden, chunks.weight, chunks.bias, chunks.labels, *how)


class _Products:
    """Products of chunks with the weight, and gradients of the operands, summed over chunks.

    Args:
        chunks: The chunks.
        needed: Whether hidden states, weight and bias need a gradient.
    """

    def __init__(self, chunks: Chunks, needed: Sequence[bool] = (False, False, False)) -> None:
        self._chunks = chunks
        self._weight = chunks.weight.to(chunks.dtype)
        self._bias = None if chunks.bias is None else chunks.bias.to(chunks.dtype)
        needs_hidden, self._needs_weight, needs_bias = needed
        bias = chunks.bias if needs_bias else None
        self._of_hidden = torch.empty_like(chunks.hidden) if needs_hidden else None
        self._of_weight: Tensor | None = None  # the first chunk's product makes it
        self._of_bias = None if bias is None else torch.zeros_like(bias, dtype=chunks.wide)

    def vectors(self, part: slice) -> Tensor:
        """Return the vectors of a chunk in the dtype of the products."""
        return self._chunks.hidden[part].to(self._chunks.dtype)

    def logits(self, part: slice) -> Tensor:
        """Return the logits of a chunk."""
        return functional.linear(self.vectors(part), self._weight, self._bias)

    def add(self, part: slice, gradient: Tensor) -> None:
        """Add a chunk to the gradients; `gradient` is that of its logits."""
        chunks = self._chunks
        if self._of_hidden is not None:
            self._of_hidden[part] = gradient @ self._weight
        if self._of_weight is not None:
            chunks.kernels.add_product(self._of_weight, gradient, self.vectors(part))
        elif self._needs_weight:
            self._of_weight = chunks.kernels.product(gradient, self.vectors(part), chunks.wide)
        if self._of_bias is not None:
            self._of_bias += gradient.sum(0, dtype=chunks.wide)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients by a scalar."""
        for gradient in (self._of_hidden, self._of_weight, self._of_bias):
            if gradient is not None:
                gradient.mul_(factor)

    def finished(self) -> _Found:
        """Return the gradients in the dtypes of the operands; call it once, in a backward function.

        None stands for a gradient that is added to its sum already.
        """
        chunks, hidden, weight, bias = self._chunks, self._of_hidden, self._of_weight, self._of_bias
        self._of_hidden = self._of_weight = self._of_bias = None
        if self._needs_weight and weight is None:  # no row, so no chunk
            weight = torch.zeros_like(chunks.weight)
        return (
            None if hidden is None else hidden.to(chunks.hidden.dtype),
            None if weight is None else add_gradient(chunks.weight, weight.to(chunks.weight.dtype)),
            None if bias is None or chunks.bias is None else bias.to(chunks.bias.dtype),
        )


class _LossesOfRows(torch.autograd.Function):
    """A loss for each row."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        chunks = _chunks_of(args)
        losses, kept = chunks.hidden.new_empty(len(chunks.labels), dtype=chunks.wide), None
        with torch.autocast(chunks.hidden.device.type, enabled=False):
            products = _Products(chunks)
            for part in chunks.parts():
                losses[part], again = chunks.kernels.losses(products.logits(part), chunks.labels[part])
                if again is not None:
                    kept = again.new_empty(len(chunks.labels)) if kept is None else kept
                    kept[part] = again
        ctx.save_for_backward(*args[:4], kept)
        ctx.how = args[4:]
        return losses

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden, weight, bias, labels, kept = ctx.saved_tensors  # read once: torch's checkpoint allows no more
        chunks = _chunks_of((hidden, weight, bias, labels, *ctx.how))
        found = _computed_again(chunks, ctx.needs_input_grad[:3], kept, grad_outputs[0])
        return (*found, None, None, None, None)


class _SummedLoss(torch.autograd.Function):
    """The sum of all rows' losses.

    The first backward pass scales the gradients of the forward pass in place and hands them out. A second one, through a retained graph,
    computes them anew.
    """

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        chunks = _chunks_of(args)
        total = chunks.hidden.new_zeros((), dtype=chunks.wide)
        needs_gradient = any(ctx.needs_input_grad[:3])
        with torch.autocast(chunks.hidden.device.type, enabled=False):
            products = _Products(chunks, ctx.needs_input_grad[:3])
            for part in chunks.parts():
                logits, labels = products.logits(part), chunks.labels[part]
                if needs_gradient:
                    losses, gradient = chunks.kernels.losses_and_gradient(logits, labels)
                    products.add(part, gradient)
                    del gradient
                else:
                    losses, _ = chunks.kernels.losses(logits, labels)
                total += losses.sum()
                del logits  # or it would live beside the next chunk's
        ctx.save_for_backward(*args[:4])
        ctx.how, ctx.held = args[4:], products
        return total

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        factor, products = grad_outputs[0], ctx.held
        ctx.held = None
        if products is None:
            chunks = _chunks_of((*ctx.saved_tensors, *ctx.how))
            found = _computed_again(chunks, ctx.needs_input_grad[:3], None, factor.expand(len(chunks.labels)))
        else:
            products.scale(factor)
            found = products.finished()
        return (*found, None, None, None, None)


def _chunks_of(args: Sequence[Any]) -> Chunks:
    hidden, weight, bias, labels, rows, dtype, kernels = args
    return Chunks(hidden=hidden, weight=weight, bias=bias, labels=labels, rows=rows, dtype=dtype, kernels=kernels)


def _computed_again(chunks: Chunks, needed: Sequence[bool], kept: Tensor | None, outer: Tensor) -> _Found:
    """Return the gradients of the operands; `outer` (N) is the gradient of each row's loss.

    `kept` (N) holds the values that the kernels' `losses` returned for `gradient`; None if they are to be computed again, or if there are none.
    """
    with torch.autocast(chunks.hidden.device.type, enabled=False):
        products = _Products(chunks, needed)
        for part in chunks.parts():
            logits, labels = products.logits(part), chunks.labels[part]
            again = chunks.kernels.kept(logits, labels) if kept is None else kept[part]
            gradient = chunks.kernels.gradient(logits, labels, again, outer[part])
            products.add(part, gradient)
            del logits, gradient  # or they would live beside the next chunk's
    return products.finished()
