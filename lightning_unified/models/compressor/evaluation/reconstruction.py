"""Reconstruct dropped tokens greedily, and score the texts by ROUGE-L."""

import re

import torch
from torch import Tensor

from lightning_unified.models.compressor.evaluation.subject import Subject

__all__ = ["check_blind", "greedy", "rouge_l"]


@torch.no_grad()
def greedy(subject: Subject, ids: Tensor, *, keep: Tensor, mask: Tensor, guess: Tensor | None = None) -> Tensor:
    """Replace each dropped token by the likeliest one; kept tokens stay, pads are 0; (B, T).

    All dropped positions are filled at once with the likeliest tokens, repeatedly until nothing changes. A model that sees only the
    kept tokens needs one pass, and a second one to confirm it. For a model that writes in order, every pass makes one more position
    final. The result equals writing token by token, mostly in far fewer passes. The first guess changes only the number of passes.

    Shapes:
        `ids`, `keep`, `mask`, `guess` (B, T).

    Args:
        subject: A subject that passes `check_blind`.
        ids: The text.
        keep: Whether each token was kept; other ids are not read.
        mask: False at pads.
        guess: First tokens of dropped positions; by default 0.

    Source:
        Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding" (Jacobi decoding).
    """
    dropped = mask & ~keep
    text = torch.where(mask & keep, ids, (torch.zeros_like(ids) if guess is None else guess) * mask)
    open_rows = dropped.any(1).nonzero().squeeze(1)
    for _ in range(ids.shape[1]):
        if not len(open_rows):
            break
        logits = subject.reconstruct(text[open_rows], keep[open_rows], mask[open_rows])
        filled = torch.where(dropped[open_rows], logits.argmax(-1), text[open_rows])
        changed = (filled != text[open_rows]).any(1)
        text[open_rows] = filled
        open_rows = open_rows[changed]
    return text


@torch.no_grad()
def check_blind(subject: Subject, ids: Tensor, *, keep: Tensor, mask: Tensor) -> None:
    """Raise for a reconstruction that can see dropped tokens.

    In each row, one dropped token is replaced by another; the logits up to its position must not change. Otherwise, the cross-entropy
    would measure copying.

    Raises:
        RuntimeError: If the logits change.
    """
    dropped = mask & ~keep
    rows = dropped.any(1).nonzero().squeeze(1)
    if not len(rows):
        return
    ids, keep, mask, dropped = ids[rows], keep[rows], mask[rows], dropped[rows]
    # the dropped token nearest to the middle can leak to positions on both sides
    middle = mask.sum(1, keepdim=True) / 2
    distance = (torch.arange(ids.shape[1], device=ids.device) - middle).abs().masked_fill(~dropped, torch.inf)
    place = distance.argmin(1, keepdim=True)
    original = subject.reconstruct(ids, keep, mask)
    others = ids.scatter(1, place, (ids.gather(1, place) + 1) % original.shape[-1])
    moved = (subject.reconstruct(others, keep, mask) - original).abs().amax(-1)
    seen = moved.masked_fill(torch.arange(ids.shape[1], device=ids.device) > place, 0).amax()
    # another order of sums within a batch changes logits by rounding only
    if float(seen) > 1e-3 * float(original.abs().amax().clamp(min=1)):
        raise RuntimeError(
            f"reconstruct() can see dropped tokens: exchanging one moved the logits at or before it by {float(seen):.3g}. Its "
            "cross-entropy would be that of a copy; hide dropped tokens from the reconstructor."
        )


_WORD = re.compile(r"\w+")


def rouge_l(text: str, reference: str) -> float:
    """Return ROUGE-L, from 0 to 1, of words without case and punctuation.

    Two texts without words are equal: 1.

    Source:
        Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", section 3, with precision and recall of one weight.
    """
    words, wanted = _WORD.findall(text.lower()), _WORD.findall(reference.lower())
    if not words or not wanted:
        return float(words == wanted)
    common = _longest_common(words, wanted)
    return 2 * common / (len(words) + len(wanted))


def _longest_common(first: list[str], second: list[str]) -> int:
    """Return the length of the longest common subsequence, a whole row of the table at a time.

    Bit i of `row` is 0 where the table's row rises at i.

    Source:
        Hyyrö 2004, "Bit-parallel LCS-length computation revisited".
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(first)) - 1
    row = full
    for word in second:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(first) - row.bit_count()
