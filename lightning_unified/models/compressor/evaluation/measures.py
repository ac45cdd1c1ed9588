"""Measures of a choice of tokens: cost of restoring, cost of the continuation, ROUGE-L."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.models.compressor.evaluation.pieces import Batch, pad_rows
from lightning_unified.models.compressor.evaluation.reconstruction import greedy, rouge_l
from lightning_unified.models.compressor.evaluation.subject import Subject

__all__ = ["MEASURES", "Sums", "full_context", "measure"]

MEASURES = ("dropped_cross_entropy", "continuation_cross_entropy", "rouge_l", "kept_ratio")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """One measure of a batch's pieces: sums and numbers of terms, lists of B."""

    sums: list[float]
    counts: list[int]


@torch.no_grad()
def measure(subject: Subject, batch: Batch, *, keep: Tensor, reconstruct: bool = True) -> dict[str, Sums]:
    """Return every measure of one choice of tokens `keep` (B, T) bool.

    - `dropped_cross_entropy`: nats per dropped token, predicted from the kept tokens.
    - `continuation_cross_entropy`: nats per token of the continuation after the kept tokens; its exponential is the
      perplexity.
    - `rouge_l`: of the greedy reconstruction against the text.
    - `kept_ratio`: kept tokens over real tokens.

    The subject must be in eval mode. `reconstruct` tells whether to write texts for ROUGE-L, the slowest part.
    """
    dropped, ids = batch.mask & ~keep, batch.ids
    logits = subject.reconstruct(ids, keep, batch.mask)
    following = subject.continue_logits(ids, keep, batch.mask, batch.continuation, batch.continuation_mask)
    found = {
        "dropped_cross_entropy": _cross_entropy(logits, ids, scored=dropped),
        "continuation_cross_entropy": _cross_entropy(following, batch.continuation, scored=batch.continuation_mask),
        "kept_ratio": Sums(sums=keep.sum(1).float().tolist(), counts=batch.mask.sum(1).tolist()),
    }
    if reconstruct:
        decode: Callable[[list[int]], str] = subject.tokenizer.decode
        written = greedy(subject, ids, keep=keep, mask=batch.mask, guess=logits.argmax(-1))
        lengths = batch.mask.sum(1).tolist()
        scores = [
            rouge_l(decode(guess[:length]), decode(text[:length]))
            for guess, text, length in zip(written.tolist(), ids.tolist(), lengths, strict=True)
        ]
        found["rouge_l"] = Sums(sums=scores, counts=[1] * len(scores))
    return found


@torch.no_grad()
def full_context(subject: Subject, batch: Batch) -> dict[str, Sums]:
    """Return `continuation_cross_entropy` and `text_cross_entropy` of the uncompressed text.

    The second is over every token of the text but the first. It shows the quality of the surprisal baseline's model.
    """
    rows = [
        torch.cat([ids[mask], continuation[shown]])
        for ids, mask, continuation, shown in zip(
            batch.ids, batch.mask, batch.continuation, batch.continuation_mask, strict=True
        )
    ]
    ids, mask = pad_rows(rows)
    logits, target = subject.next_logits(ids, mask)[:, :-1], ids[:, 1:]
    is_text = torch.arange(1, ids.shape[1], device=ids.device) < batch.mask.sum(1, keepdim=True)
    return {
        "continuation_cross_entropy": _cross_entropy(logits, target, scored=mask[:, 1:] & ~is_text),
        "text_cross_entropy": _cross_entropy(logits, target, scored=is_text),
    }


def _cross_entropy(logits: Tensor, target: Tensor, *, scored: Tensor) -> Sums:
    losses = functional.cross_entropy(logits.float().transpose(1, 2), target, reduction="none")
    return Sums(sums=losses.masked_fill(~scored, 0.0).sum(1).tolist(), counts=scored.sum(1).tolist())
