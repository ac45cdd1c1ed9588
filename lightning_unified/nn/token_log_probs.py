"""Log-probabilities of tokens without holding all logits, and filters for draws.

A group of 8 completions of 1,024 tokens over a vocabulary of 151,936 has 5 GB of fp32 logits. Their
gradient has the same size. In this module, both exist for a few rows at a time.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

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
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Return `log_softmax(hidden @ weight.T / temperature)` at `tokens`.

    The backward pass computes the chunks again. A frozen weight, as under low-rank adapters, gets no gradient. Products run in the
    operands' dtype or autocast's, the softmax and all sums in at least fp32.

    Shapes:
        hidden (N, D), weight (V, D), tokens (N) int64 from 0 to V - 1.

    Args:
        hidden: See Shapes.
        weight: See Shapes.
        tokens: See Shapes.
        temperature: Divisor of the logits, as in sampling.
        chunk: Rows of a chunk; by default `chunk_rows_for(V, rows=N)`.

    Returns:
        (N), in fp32 when the operands are of half precision, else in their own type.

    Raises:
        ValueError: If the shapes do not fit, or `temperature` or `chunk` is not positive.
    """
    return _both(hidden, weight, tokens, temperature=temperature, chunk=chunk, with_entropy=False)[0]


def token_log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `token_log_probs` and each row's entropy (N) in nats, which has no gradient.

    Arguments and errors are those of `token_log_probs`.
    """
    return _both(hidden, weight, tokens, temperature=temperature, chunk=chunk, with_entropy=True)


def _both(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float, chunk: int | None, with_entropy: bool
) -> tuple[Tensor, Tensor]:
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
    return _ChunkedLogProbs.apply(hidden, weight, tokens, temperature, rows, dtype, with_entropy)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities of one token a row, and entropies on request (else an empty tensor)."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, tokens, temperature, rows, dtype, with_entropy = args
        ctx.save_for_backward(hidden, weight, tokens)
        ctx.temperature, ctx.rows, ctx.dtype = temperature, rows, dtype
        wide = torch.promote_types(dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=wide)
        entropies = hidden.new_empty(len(hidden) if with_entropy else 0, dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            operand = weight.to(dtype)
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                scores = _all_log_probs(hidden[part].to(dtype), operand, temperature=temperature)
                log_probs[part] = scores.gather(1, tokens[part, None]).squeeze(1)
                if with_entropy:
                    entropies[part] = -(scores.exp().mul_(scores)).sum(1)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden, weight, tokens = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        outer = (grad_outputs[0] / ctx.temperature).unsqueeze(1)
        with torch.autocast(hidden.device.type, enabled=False):
            operand = weight.to(ctx.dtype)
            for start in range(0, len(hidden), ctx.rows):
                part = slice(start, start + ctx.rows)
                x = hidden[part].to(ctx.dtype)
                gradient = _all_log_probs(x, operand, temperature=ctx.temperature).exp_().mul_(-outer[part])
                gradient = gradient.scatter_add_(1, tokens[part, None], outer[part]).to(ctx.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = gradient @ operand
                if grad_weight is not None:
                    grad_weight += gradient.T @ x
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _all_log_probs(hidden: Tensor, weight: Tensor, *, temperature: float) -> Tensor:
    """Return the log-probabilities (n, V) of all tokens in at least fp32, computed in place."""
    logits = functional.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)
    return logits.sub_(logits.logsumexp(1, keepdim=True))
