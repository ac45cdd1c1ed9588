"""Measures of a choice of tokens: cost of restoring, cost of the continuation, ROUGE-L."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.models.compressor.evaluation.pieces import Batch
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
    """Return every measure of one choice of tokens.

    - `dropped_cross_entropy`: nats per dropped token, predicted from the kept tokens.
    - `continuation_cross_entropy`: nats per token of the continuation after the kept tokens; its exponential is the
      perplexity.
    - `rouge_l`: of the greedy reconstruction against the text.
    - `kept_ratio`: kept tokens over real tokens.

    Shapes:
        `keep` (B, T) bool.

    Args:
        subject: In eval mode.
        batch: The pieces.
        keep: Whether each token stays.
        reconstruct: Whether to write texts for ROUGE-L, the slowest part.
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
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    prefix, whole = batch.mask.sum(1, keepdim=True), torch.tensor([[len(row)] for row in rows], device=ids.device)
    places = torch.arange(ids.shape[1], device=ids.device)
    logits = subject.next_logits(ids, places < whole)[:, :-1]
    target, places = ids[:, 1:], places[1:]
    return {
        "continuation_cross_entropy": _cross_entropy(logits, target, scored=(places >= prefix) & (places < whole)),
        "text_cross_entropy": _cross_entropy(logits, target, scored=places < prefix),
    }


def _cross_entropy(logits: Tensor, target: Tensor, *, scored: Tensor) -> Sums:
    losses = functional.cross_entropy(logits.float().transpose(1, 2), target, reduction="none")
    return Sums(sums=losses.masked_fill(~scored, 0.0).sum(1).tolist(), counts=scored.sum(1).tolist())
