"""Cross-entropy of a linear layer, without holding all logits.

With a vocabulary of 32,000, the logits of 2 x 512 tokens take 131 MB in fp32 and their gradient as much again: more than
a 34-million-parameter model's weights. Here both exist for a few rows at a time.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.nn.autograd_limits import only_first_derivative
from lightning_unified.nn.cross_entropy.chunks import Chunks, losses_of_rows, summed_loss
from lightning_unified.nn.cross_entropy.derived import transformed
from lightning_unified.nn.cross_entropy.kernels import IGNORED, Fused, kernels_for
from lightning_unified.nn.cross_entropy.scored_labels import ScoredLabels, with_labels

__all__ = [
    "IGNORED",
    "chunk_rows_for",
    "gradients_in_forward",
    "linear_cross_entropy",
    "trains_only_hidden",
]

_CHUNK_BYTES = 16 * 2**20
# a smaller chunk rereads the sum of the weight's gradient more often: benchmarks/options/loss/chunked_loss.json
_FUSED_CHUNK_BYTES = 512 * 2**20
_FEWEST_IN_FORWARD = 1024  # judgement: rows; callers that ask for smaller chunks lack memory
_MOST_CHUNKS = 64  # judgement: with more chunks, a GPU waits for launches; 64 hold 1/64 of all logits each


def chunk_rows_for(num_classes: int, *, rows: int = 0, logit_bytes: int | None = None) -> int:
    """Return the number of rows in a chunk, a power of two.

    The logits of a chunk take at most 16 MiB in fp32, or 512 MiB with fused kernels. torch's own choice depends on the shape of
    the batch and was up to several times slower on a CPU. A chunk has at least 16 rows, since smaller matrix products are
    inefficient, and at most 8192, since larger ones gain nothing. It is larger if there would be over 64 chunks: a batch that
    large has enough memory for it.

    Args:
        num_classes: Entries of a row of logits.
        rows: Rows of the whole batch; 0 where unknown.
        logit_bytes: Bytes of a logit where fused kernels compute the chunk; None where torch's operators do.
    """
    most = _CHUNK_BYTES // 4 if logit_bytes is None else _FUSED_CHUNK_BYTES // logit_bytes
    fitting = max(16, min(8192, most // num_classes))
    return max(1 << (fitting.bit_length() - 1), -(-rows // _MOST_CHUNKS))


def linear_cross_entropy(
    hidden: Tensor,
    *,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    reduction: Literal["none", "sum", "mean"] = "mean",
    chunk_rows: int | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `cross_entropy(transform(linear(hidden, weight, bias)), labels)`.

    Labels of -100 are not scored. With reduction "sum" or "mean", the forward pass computes the gradients of a chunk beside its losses, if
    `chunk_rows` is None or at least 1024, or `weight` and `bias` are frozen. Between the passes it holds gradients of the size of `hidden`
    and of the trained ones of `weight` and `bias` (in fp32). Otherwise the backward pass computes the logits again. That takes about a third
    more time in this layer, and no such tensor lives between the passes, while the rest of the network runs.

    The backward pass adds a trained leaf `weight`'s gradient to an existing `weight.grad` itself (`cross_entropy/added_gradient.py`).

    torch's `linear_cross_entropy` (2.13) computes fp32 and fp64 losses, with reduction "none". Its "sum" and "mean" hold two copies
    of the weight's gradient from the forward pass on, for any chunk size. "sum", which computes no chunk twice, is used only if such
    a copy is no larger than a chunk of logits. Under autocast and in half precision, the function below computes the losses: torch's
    ignores autocast and rounds each loss to bf16.

    Shapes:
        hidden (..., D), labels (...), weight (V, D), bias (V). The chunks run over the flattened leading dimensions.

    Args:
        hidden: See Shapes.
        weight: See Shapes.
        labels: See Shapes; int64, 0 to V - 1 or -100.
        bias: See Shapes.
        reduction: "sum" over the scored labels, their "mean" (NaN when none is scored, as in torch), or "none": a loss for each
            label, 0 where it is not scored, for callers that weight them.
        chunk_rows: Rows of a chunk; by default `chunk_rows_for(V, rows=...)`.
        transform: The model's function of the layer's output of a chunk (N, V), for example a soft cap; None for nothing. It treats each
            row by itself, and no gradient flows to other tensors in it.

    Returns:
        The loss, a scalar, or (...) with "none": in fp32 when the operands are of half precision, else in their own type.

    Raises:
        ValueError: If the shapes do not fit, the reduction is unknown or `chunk_rows` is not positive.
    """
    _check(hidden, weight, labels, reduction, chunk_rows)
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    dtype = _dtype_of_products(flat)
    kernels = kernels_for(flat, dtype) if transform is None else transformed(transform)
    fused = isinstance(kernels, Fused)
    if chunk_rows is None:
        rows = chunk_rows_for(weight.shape[0], rows=len(flat), logit_bytes=dtype.itemsize if fused else None)
    else:
        rows = chunk_rows
    is_reduced, only_hidden = reduction != "none", trains_only_hidden(flat, weight, bias)
    in_forward = is_reduced and (only_hidden or gradients_in_forward(chunk_rows))
    if _torch_does_it(flat) and transform is None and not fused and not only_hidden:
        summed = is_reduced and weight.nbytes <= _CHUNK_BYTES
        losses = _torch_losses(flat, weight=weight, labels=targets, bias=bias, rows=rows, summed=summed)
    else:
        if fused:
            _refuse_unoffered(targets, weight.shape[0])
        chunks = Chunks(hidden=flat, weight=weight, bias=bias, labels=targets, rows=rows, dtype=dtype, kernels=kernels)
        losses = summed_loss(chunks) if in_forward else losses_of_rows(chunks)
    losses = only_first_derivative(losses, "linear_cross_entropy", "compute the logits and call cross_entropy")
    losses = with_labels(losses, ScoredLabels(labels=targets, ignore_index=IGNORED))
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    if reduction == "sum":
        return total
    scored = (targets != IGNORED).sum()
    return mean_of_scored(total, terms=scored, is_empty=scored == 0)


def mean_of_scored(total: Tensor, *, terms: Tensor, is_empty: Tensor) -> Tensor:
    """Return `total / terms`.

    Without a scored label it is NaN and passes gradients of 0, as torch's loss does.

    Args:
        total: The sum of all losses, a scalar.
        terms: The divisor, a scalar.
        is_empty: Whether no label is scored, a scalar.
    """
    mean = total / terms.masked_fill(is_empty, 1).to(total.dtype)
    return mean + mean.new_zeros(()).masked_fill(is_empty, torch.nan)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, chunk_rows: int | None) -> None:
    if reduction not in {"none", "sum", "mean"}:
        raise ValueError(f"reduction={reduction!r} is not offered; choose 'none', 'sum' or 'mean'.")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, labels {tuple(labels.shape)} and weight {tuple(weight.shape)} do not fit; "
            "they are (..., D), (...) and (V, D)."
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} is not a number of rows; give 1 or more, or None.")


def _refuse_unoffered(labels: Tensor, num_classes: int) -> None:
    """Stop the device at a label that is no class, as torch's kernel does, without waiting."""
    offered = (labels == IGNORED) | ((labels >= 0) & (labels < num_classes))
    torch._assert_async(offered.all(), f"a label is neither {IGNORED} nor from 0 to {num_classes - 1}")  # pyright: ignore[reportPrivateImportUsage]


def _dtype_of_products(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if _autocast(device) else hidden.dtype


def _autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _torch_does_it(hidden: Tensor) -> bool:
    full = hidden.dtype in {torch.float32, torch.float64}
    return hasattr(functional, "linear_cross_entropy") and full and not _autocast(hidden.device.type)


def _torch_losses(
    hidden: Tensor, *, weight: Tensor, labels: Tensor, bias: Tensor | None, rows: int, summed: bool
) -> Tensor:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions  # new in torch 2.13

    options = LinearCrossEntropyOptions(batch_chunk_size=rows, acc_policy="compact", allow_retain_graph=summed)
    return functional.linear_cross_entropy(
        hidden,
        weight,
        labels,
        linear_bias=bias,
        reduction="sum" if summed else "none",
        ignore_index=IGNORED,
        options=options,
    )


def gradients_in_forward(chunk_rows: int | None) -> bool:
    """Return whether a reduced loss computes its gradients in the forward pass.

    No logits are computed twice then.

    Args:
        chunk_rows: The rows of a chunk that the caller asked for; None where the caller leaves the number open.
    """
    return torch.is_grad_enabled() and (chunk_rows is None or chunk_rows >= _FEWEST_IN_FORWARD)


def trains_only_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a linear layer's input needs a gradient and none of its parameters does."""
    is_frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    return is_frozen and hidden.requires_grad and torch.is_grad_enabled()
