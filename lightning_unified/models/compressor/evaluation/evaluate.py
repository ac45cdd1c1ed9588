"""Evaluate a policy and all baselines at the same budgets on the same documents."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_unified.data.ngram import NGram, perplexity
from lightning_unified.models.compressor.evaluation import baselines, timing
from lightning_unified.models.compressor.evaluation.measures import Sums, full_context, measure
from lightning_unified.models.compressor.evaluation.pieces import Batch, Piece, batches, divide
from lightning_unified.models.compressor.evaluation.reconstruction import check_blind
from lightning_unified.models.compressor.evaluation.statistics import Values, exponential, policy_against, rows
from lightning_unified.models.compressor.evaluation.subject import (
    Subject,
    check_keep,
    evaluating,
    require_trained,
    top_k,
)

__all__ = ["KEEPS", "EvaluationOptions", "evaluate"]

KEEPS = (0.3, 0.5, 0.7, 0.9)
_FULL = ("full context", 1.0)  # key of the uncompressed text's totals


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOptions:
    """Pieces, measures and statistics of an evaluation.

    Attributes:
        keeps: The budgets, below 1.
        length: Tokens of a compressed prefix; None takes as many as in training.
        continuation: Tokens after it, predicted from the kept tokens; None takes a quarter of the prefix.
        per_document: Pieces of a document at most.
        batch_size: Pieces of a batch.
        reconstruct: Whether to write texts for ROUGE-L, the slowest part.
        repeats: Timed passes; 0 for no timing.
        resamples: Resamples of bootstrap and permutation test.
        seed: Seed of random scores, ties and resampling.

    Raises:
        ValueError: If a budget is not a share of the tokens, or drops none.
    """

    keeps: Sequence[float] = KEEPS
    length: int | None = None
    continuation: int | None = None
    per_document: int = 4
    batch_size: int = 32
    reconstruct: bool = True
    repeats: int = 5
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if any(check_keep(keep) == 1 for keep in self.keeps):
            raise ValueError("keep=1 drops nothing, so there is nothing to measure; give budgets below 1.")

    def piece_lengths(self, trained_length: int) -> tuple[int, int]:
        """Return the numbers of tokens of a prefix and of its continuation.

        The model was trained on `trained_length` tokens.
        """
        length = self.length or trained_length
        return length, self.continuation or max(length // 4, 1)


def evaluate(
    subject: Subject,
    texts: Sequence[str],
    *,
    corpus: Sequence[str],
    options: EvaluationOptions,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate the policy and the baselines at every budget.

    The result has 95 % intervals over documents and paired tests. Each method keeps exactly `round(keep * n)` of a piece's n tokens,
    and the subject's reconstructor restores the rest. A value is the mean over documents of each document's mean over terms.

    Args:
        subject: A trained compressor; in eval mode during the call, then restored.
        texts: Held-out documents, one text each.
        corpus: Training documents, for frequencies and n-grams.
        options: Budgets, pieces and statistics.
        progress: Called after each batch with the numbers of finished and of all batches.

    Returns:
        A record for JSON with these keys:

        - `documents`, `pieces`, `tokens`, `continuation_tokens`: their numbers;
        - `settings`: the arguments of the evaluation, and the corpus's number of tokens;
        - `language_model`: its perplexity and a trigram model's on the same tokens, and the perplexity of the continuation
          after the full text;
        - `rows`: method, keep, and the mean, low and high of each measure;
        - `policy_against`: baseline, keep, measure, the paired difference, its p-value, and whether the intervals are apart;
        - `seconds`: the timings.

    Raises:
        ValueError: If a setting is invalid, or texts or corpus are too short.
        RuntimeError: If the subject is untrained, or its reconstructor can see dropped tokens.
    """
    encoder, keeps = require_trained(subject), list(options.keeps)
    length, continuation = options.piece_lengths(subject.text_length)
    sizes = {"length": length, "continuation": continuation, "per_document": options.per_document}
    pieces = divide(texts, encoder=encoder, **sizes)
    encoded = [ids for text in corpus if (ids := encoder.encode(text))]
    every = list(batches(pieces, size=options.batch_size, device=subject.device))
    largest = max(every, key=lambda batch: batch.ids.numel())
    with evaluating(subject):
        vocabulary = subject.next_logits(largest.ids[:1], largest.mask[:1]).shape[-1]
        methods = baselines.scorers(subject, corpus=encoded, vocabulary=vocabulary, seed=options.seed)
        half = top_k(methods["random"](largest.ids, largest.mask), mask=largest.mask, keep=0.5)
        check_blind(subject, largest.ids, keep=half, mask=largest.mask)
        methods = {"policy": subject.keep_logits, **methods}
        totals = _totalled(subject, every, methods=methods, options=options, progress=progress)
        times = timing.seconds(subject, largest.ids, mask=largest.mask, keeps=tuple(keeps), repeats=options.repeats)
    values, draws = totals.means(), {"resamples": options.resamples, "seed": options.seed}
    found = rows(values, methods=list(methods), keeps=keeps, **draws)
    return {
        "documents": len({piece.document for piece in pieces}),
        "pieces": len(pieces),
        "tokens": sum(len(piece.ids) for piece in pieces),
        "continuation_tokens": sum(len(piece.continuation) for piece in pieces),
        "settings": {**sizes, "keeps": keeps, **draws, "corpus_tokens": sum(len(ids) for ids in encoded)},
        "language_model": _language_model(totals, pieces, corpus=encoded, vocabulary=vocabulary),
        "rows": found,
        "policy_against": policy_against(values, found, **draws),
        "seconds": times,
    }


def _totalled(
    subject: Subject,
    every: list[Batch],
    *,
    methods: dict[str, baselines.Scorer],
    options: EvaluationOptions,
    progress: Callable[[int, int], None] | None,
) -> "_Totals":
    """Return every measure by method and budget, and of the full context, summed by document."""
    totals = _Totals(num_documents=1 + max(int(batch.documents.max()) for batch in every))
    for done, batch in enumerate(every, start=1):
        totals.add(*_FULL, batch, full_context(subject, batch))
        for name, scorer in methods.items():
            scores = scorer(batch.ids, batch.mask)
            for keep in options.keeps:
                chosen = top_k(scores, mask=batch.mask, keep=keep, seed=options.seed)
                totals.add(name, keep, batch, measure(subject, batch, keep=chosen, reconstruct=options.reconstruct))
        if progress is not None:
            progress(done, len(every))
    return totals


def _language_model(
    totals: "_Totals", pieces: list[Piece], *, corpus: list[list[int]], vocabulary: int
) -> dict[str, Any]:
    """Return the perplexities of the surprisal model and of a trigram model.

    Both read the same tokens.
    """
    trigram = NGram([(np.array(ids), np.array(ids)) for ids in corpus], vocab_size=vocabulary, order=3)
    judged = [(np.array(piece.ids), np.array([-100, *piece.ids[1:]])) for piece in pieces]
    following = totals.means()[*_FULL, "continuation_cross_entropy"]
    return {
        "perplexity": exponential(totals.overall(*_FULL, "text_cross_entropy")),
        "trigram_perplexity": perplexity(trigram, judged),
        "full_context_continuation_perplexity": exponential(float(np.nanmean(following))),
    }


class _Totals:
    """Sums and counts of every document, by method, budget and measure."""

    def __init__(self, *, num_documents: int) -> None:
        self._sums: dict[tuple[str, float, str], np.ndarray] = defaultdict(lambda: np.zeros((2, num_documents)))

    def add(self, method: str, keep: float, batch: Batch, found: dict[str, Sums]) -> None:
        for name, terms in found.items():
            table = self._sums[method, keep, name]
            for place, added in enumerate((terms.sums, terms.counts)):
                table[place] += np.bincount(batch.documents, weights=added, minlength=table.shape[1])

    def means(self) -> Values:
        """Return each document's mean, NaN without a term."""
        return {key: np.where(n > 0, total / np.maximum(n, 1), np.nan) for key, (total, n) in self._sums.items()}

    def overall(self, method: str, keep: float, name: str) -> float:
        """Return the mean over all terms of all documents."""
        total, count = self._sums[method, keep, name].sum(1)
        return float(total / count)
