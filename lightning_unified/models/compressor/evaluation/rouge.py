"""ROUGE-L of two texts: the longest common subsequence of their words, as an F-measure."""

import re

__all__ = ["rouge_l"]

_WORD = re.compile(r"\w+")


def rouge_l(text: str, reference: str) -> float:
    """Return ROUGE-L, 0 to 1, of words without case and punctuation; two texts without words are equal: 1.

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
