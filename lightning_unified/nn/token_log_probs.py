"""Log-probabilities of tokens without holding all logits, and filters for draws.

A group of 8 completions of 1,024 tokens over a vocabulary of 151,936 has 5 GB of fp32 logits. Their
gradient has the same size. In this module, both exist for a few rows at a time.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_unified.nn.autograd_limits import refuse_second_derivative
from lightning_unified.nn.cross_entropy.added_gradient import add_gradient
from lightning_unified.nn.cross_entropy.derived import without_saved_tensor_hooks
from lightning_unified.nn.cross_entropy.row_parts import parts
from lightning_unified.nn.linear_cross_entropy import chunk_rows_for

__all__ = ["filter_logits", "token_log_probs", "token_log_probs_and_entropy"]


def filter_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return `logits` (B, V) with -inf at tokens outside top_k and top_p; at least one stays."""
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        surplus = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(surplus).scatter(1, order, surplus), -torch.inf)
    return logits


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `log_softmax(transform(linear(hidden, weight, bias)) / temperature)` at `tokens`.

    The backward pass computes the chunks again. A frozen weight, as under low-rank adapters, gets no gradient. Products run in the
    operands' dtype or autocast's, the softmax and all sums in at least fp32.

    Shapes:
        hidden (N, D), weight (V, D), bias (V), tokens (N) int64 from 0 to V - 1.

    Args:
        hidden: See Shapes.
        weight: See Shapes.
        tokens: See Shapes.
        bias: See Shapes.
        temperature: Divisor of the logits, as in sampling.
        chunk: Rows of a chunk; by default `chunk_rows_for(V, rows=N)`.
        transform: See `lightning_unified.nn.linear_cross_entropy.linear_cross_entropy`.

    Returns:
        (N), in fp32 when the operands are of half precision, else in their own type.

    Raises:
        ValueError: If the shapes do not fit, or `temperature` or `chunk` is not positive.
    """
    head = _Head(weight, bias, transform)
    return _both(hidden, head, tokens, temperature=temperature, chunk=chunk, with_entropy=False)[0]


def token_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `token_log_probs` and each row's entropy (N) in nats, which has no gradient.

    Arguments and errors are those of `token_log_probs`.
    """
    head = _Head(weight, bias, transform)
    return _both(hidden, head, tokens, temperature=temperature, chunk=chunk, with_entropy=True)


class _Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    transform: Callable[[Tensor], Tensor] | None


def _both(
    hidden: Tensor, head: _Head, tokens: Tensor, *, temperature: float, chunk: int | None, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    weight = head.weight
    if hidden.dim() != 2 or weight.dim() != 2 or (len(hidden), weight.shape[1]) != (tokens.numel(), hidden.shape[1]):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and tokens {tuple(tokens.shape)} do not fit; they are "
            "(N, D), (V, D) and (N)."
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature={temperature}; give a number above 0: greedy decoding has no distribution to train."
        )
    rows = chunk_rows_for(len(weight), rows=len(hidden)) if chunk is None else chunk
    if rows < 1:
        raise ValueError(f"chunk={chunk} is not a number of rows; give 1 or more, or None.")
    device = hidden.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocasts else hidden.dtype
    how = _How(head.transform, temperature, rows, dtype, with_entropy)
    return _ChunkedLogProbs.apply(hidden, weight, head.bias, tokens, how)  # pyright: ignore[reportReturnType]


class _How(NamedTuple):
    transform: Callable[[Tensor], Tensor] | None
    temperature: float
    rows: int
    dtype: torch.dtype
    with_entropy: bool

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the softmax and of sums."""
        return torch.promote_types(self.dtype, torch.float32)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities of one token a row, and entropies on request (else an empty tensor)."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, tokens, how = args
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.how = how
        log_probs = hidden.new_empty(len(hidden), dtype=how.wide)
        entropies = hidden.new_empty(len(hidden) if how.with_entropy else 0, dtype=how.wide)
        with torch.autocast(hidden.device.type, enabled=False):
            operands = _operands(weight, bias, how.dtype)
            for part in parts(hidden, how.rows):
                logits = functional.linear(hidden[part].to(how.dtype), *operands)
                if how.transform is not None:
                    logits = how.transform(logits)
                scores = _to_log_probs_(logits, how.temperature)
                log_probs[part] = scores.gather(1, tokens[part, None]).squeeze(1)
                if how.with_entropy:
                    entropies[part] = -(scores.exp().mul_(scores)).sum(1)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        refuse_second_derivative("token_log_probs", "compute the logits and call log_softmax")
        (hidden, weight, bias, tokens), how = ctx.saved_tensors, ctx.how
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=how.wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=how.wide) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            operands = _operands(weight, bias, how.dtype)
            for part in parts(hidden, how.rows):
                x = hidden[part].to(how.dtype)
                logits = functional.linear(x, *operands)
                gradient = _gradient(logits, tokens[part], grad_outputs[0][part], how).to(how.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = gradient @ operands[0]
                if grad_weight is not None:
                    grad_weight += gradient.T @ x
                if grad_bias is not None:
                    grad_bias += gradient.sum(0, dtype=how.wide)
        grad_weight = None if grad_weight is None else add_gradient(weight, grad_weight.to(weight.dtype))
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype), None, None


def _operands(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _gradient(logits: Tensor, tokens: Tensor, outer: Tensor, how: _How) -> Tensor:
    """Return the gradient (n, V) of log-probabilities weighted by `outer` (n).

    It may overwrite `logits`.
    """
    outer = (outer / how.temperature).unsqueeze(1)
    if how.transform is None:
        return _of_log_probs(logits, tokens, outer, how)
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad(), without_saved_tensor_hooks():
        result = how.transform(leaf)
    inner = _of_log_probs(result.detach().clone(), tokens, outer, how)  # autograd may have saved the result
    return torch.autograd.grad(result, leaf, inner.to(result.dtype))[0]


def _of_log_probs(logits: Tensor, tokens: Tensor, outer: Tensor, how: _How) -> Tensor:
    gradient = _to_log_probs_(logits, how.temperature).exp_().mul_(-outer)
    return gradient.scatter_add_(1, tokens[:, None], outer)


def _to_log_probs_(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities (n, V) of all tokens in fp32 or wider.

    Logits of that dtype are overwritten.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)
    return logits.sub_(logits.logsumexp(1, keepdim=True))
