"""Exact attention in chunks of queries, as an autograd function.

Torch's attention without a fused kernel saves the probabilities, B·H·L·S entries. Here the forward pass computes the scores of one chunk of
queries at a time and saves the queries, keys and values. The backward pass computes the probabilities again, chunk by chunk.

B are rows, H heads of the queries, L queries, S keys, E entries of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.nn.attention.saved import generator_state, restored, saved_once
from lightning_unified.nn.autograd_limits import refuse_second_derivative

__all__ = ["CHUNK_BYTES", "Call", "attention_in_chunks", "queries_of_chunk"]

CHUNK_BYTES = (
    8 * 2**20
)  # judgement: 64 queries of a row with 16 heads and 2,048 keys; MPS places blocks below 10 MiB in small heaps
_MULTIPLE = 32  # queries: narrower products use little of a GPU

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def queries_of_chunk(*, heads: int, queries: int, keys: int, entry_bytes: int, target: int = CHUNK_BYTES) -> int:
    """Return the number of queries whose scores are computed at one time.

    It is the largest multiple of 32 for which the scores of one row, heads x queries x keys, take at most `target` bytes; at least 32, and
    at most all queries. It does not depend on the number of rows: a micro-batch runs the same operations as the whole batch.
    """
    fitting = target // max(heads * keys * entry_bytes, 1)
    return max(min(max(fitting // _MULTIPLE, 1) * _MULTIPLE, queries), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of one call of attention, beside its tensors.

    Attributes:
        causal: Whether query i sees the keys 0 to i only.
        scale: The factor of the scores.
        dropout: The share of the probabilities that dropout sets to 0.
        groups: Heads of the queries for each head of the keys.
        chunk: Queries whose scores are computed at one time.
    """

    causal: bool
    scale: float
    dropout: float
    groups: int
    chunk: int

    def parts(self, queries: int) -> Iterator[slice]:
        """Yield the queries of each chunk."""
        for start in range(0, queries, self.chunk):
            yield slice(start, min(start + self.chunk, queries))

    def seen(self, keys: Tensor, part: slice) -> Tensor:
        """Return the keys or values (N, S, X) that a chunk of queries attends to.

        With a causal mask, these end at the chunk's last query.
        """
        return keys[:, : part.stop] if self.causal else keys

    def folded(self, rows: Tensor) -> Tensor:
        """Return (…, H, C, X) as (N, groups · C, X): the heads of one group share their keys."""
        *leading, heads, queries, entries = rows.shape
        return rows.reshape(math.prod(leading) * heads // self.groups, self.groups * queries, entries)

    def scores(self, query: Tensor, key: Tensor, mask: Tensor | None, part: slice) -> Tensor:
        """Return the masked scores (…, H, C, S) of queries (…, H, C, E) and seen keys (N, S, E)."""
        scores = torch.bmm(self.folded(query * self.scale), key.transpose(1, 2)).view(*query.shape[:-1], key.shape[1])
        if self.causal:
            keys = torch.arange(key.shape[1], device=key.device)
            scores.masked_fill_(keys > torch.arange(part.start, part.stop, device=key.device)[:, None], -torch.inf)
        if mask is None:
            return scores
        own = _of_part(mask, part)
        return scores.masked_fill_(~own, -torch.inf) if own.dtype is torch.bool else scores.add_(own)

    def weights(self, query: Tensor, key: Tensor, mask: Tensor | None, part: slice) -> Tensor:
        """Return the probabilities (…, H, C, S) of a chunk of queries.

        They are 0 for a query whose keys are all masked.
        """
        scores = self.scores(query, key, mask, part)
        hidden = None if mask is None else scores.amax(-1, keepdim=True) == -torch.inf
        weights = scores.softmax(-1)
        return weights if hidden is None else weights.masked_fill_(hidden, 0.0)

    def kept(self, weights: Tensor) -> Tensor:
        """Draw the dropout of a chunk: 0, or the factor of a probability that is kept."""
        drawn = torch.empty_like(weights).bernoulli_(1.0 - self.dropout)
        return drawn.mul_(1.0 / (1.0 - self.dropout)) if self.dropout < 1.0 else drawn


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]  # a graph cannot set back the random generator
def attention_in_chunks(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention (…, H, L, X) of a query (…, H, L, E).

    The key has (…, H / groups, S, E), the value (…, H / groups, S, X); leading dimensions are equal. The mask (…, L or 1, S) is boolean or added to the scores, and broadcasts to them. Scores and sums have
    at least float32. With dropout, both passes draw from the device's default generator, and the backward pass draws the same numbers.

    A backward pass with `create_graph=True` raises `RuntimeError`.
    """
    return _InChunks.apply(call, query, key, value, mask)  # pyright: ignore[reportReturnType]


class _InChunks(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        call, query, key, value, mask = args
        ctx.call, draws = call, call.dropout > 0
        ctx.noise = generator_state(query.device) if draws else None
        with _plain(query):
            trains = any(ctx.needs_input_grad)
            output = saved_once(
                lambda: _forward(call, query, key, value, mask), device=query.device, draws=draws, trains=trains
            )
        ctx.save_for_backward(query, key, value, mask)
        return output

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        refuse_second_derivative("attention in chunks", "set memory.attention=torch for this module")
        gradients = _Gradient(ctx.call, *ctx.saved_tensors, needs=ctx.needs_input_grad[1:])
        with _plain(grad_outputs[0]), restored(grad_outputs[0].device, ctx.noise):
            return None, *gradients.of(grad_outputs[0])


def _forward(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    key, value = _flat(key), _flat(value)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    for part in call.parts(query.shape[-2]):
        weights = call.weights(_wide(query[..., part, :]), call.seen(key, part), mask, part)
        if call.dropout > 0:
            weights.mul_(call.kept(weights))
        output[..., part, :] = torch.bmm(call.folded(weights), call.seen(value, part)).view_as(output[..., part, :])
        del weights
    return output


@dataclass(slots=True)
class _Gradient:
    """The gradients of one call's tensors, summed over the chunks."""

    call: Call
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    needs: tuple[bool, ...]

    def of(self, outer: Tensor) -> _Gradients:
        """Return the gradients of query, key, value and mask, each where it is needed."""
        call, (needs_query, needs_key, needs_value, needs_mask) = self.call, self.needs
        key, value = _flat(self.key), _flat(self.value)
        of_query = torch.empty_like(self.query) if needs_query else None
        of_key, of_value = (
            torch.zeros_like(key) if needs_key else None,
            torch.zeros_like(value) if needs_value else None,
        )
        of_mask = self._new_mask(key.dtype) if needs_mask else None
        for part in call.parts(self.query.shape[-2]):
            query = _wide(self.query[..., part, :])
            seen = call.seen(key, part)
            change = self._change(query, seen, call.seen(value, part), _wide(outer[..., part, :]), of_value, part)
            if of_mask is not None:
                target = _of_part(of_mask, part)
                target += change.sum_to_size(target.shape)
            change = call.folded(change)
            if of_query is not None:
                of_query[..., part, :] = torch.bmm(change, seen).mul_(call.scale).view_as(query)
            if of_key is not None:
                call.seen(of_key, part).baddbmm_(change.transpose(1, 2), call.folded(query), alpha=call.scale)
            del change
        return of_query, _like(of_key, self.key), _like(of_value, self.value), _like(of_mask, self.mask)

    def _change(
        self, query: Tensor, key: Tensor, value: Tensor, outer: Tensor, of_value: Tensor | None, part: slice
    ) -> Tensor:
        """Return the gradient of a chunk's scores (…, H, C, S); add the values' to `of_value`."""
        call, outer = self.call, self.call.folded(outer)
        weights = call.weights(query, key, self.mask, part)
        kept = call.kept(weights) if call.dropout > 0 else None
        if of_value is not None:
            used = weights if kept is None else weights * kept
            call.seen(of_value, part).baddbmm_(call.folded(used).transpose(1, 2), outer)
            del used
        change = torch.bmm(outer, value.transpose(1, 2)).view_as(weights)
        if kept is not None:
            change.mul_(kept)
            del kept
        return torch.ops.aten._softmax_backward_data(change, weights, -1, weights.dtype)

    def _new_mask(self, dtype: torch.dtype) -> Tensor:
        assert self.mask is not None
        return torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)


def _of_part(mask: Tensor, part: slice) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., part, :]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _flat(tensor: Tensor) -> Tensor:
    """Return (…, H, S, X) as a wide (N, S, X)."""
    return _wide(tensor).reshape(-1, *tensor.shape[-2:])


def _like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """Return a gradient in the dtype and shape of its tensor."""
    return None if gradient is None or tensor is None else gradient.to(tensor.dtype).view(tensor.shape)


def _plain(tensor: Tensor) -> torch.autocast:
    """Switch autocast off: the products are those of the tensors as they are."""
    return torch.autocast(tensor.device.type, enabled=False)
