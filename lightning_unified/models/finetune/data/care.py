"""Split examples without leakage, leave out duplicates, and describe lengths."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_unified.data.documents.document import Document
from lightning_unified.data.splitting import choose_groups, merge_groups, split
from lightning_unified.models.finetune.data.answers import Encoded
from lightning_unified.models.finetune.data.examples import Example

__all__ = ["Sides", "describe_lengths", "fitted", "length_histogram", "split_examples"]

_NAMED = 3  # examples in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The two sides of a split, and the examples left out.

    Attributes:
        train: Training examples.
        validation: Validation examples; they share no group, no question and no line of plain text with `train`.
        duplicates: Number of examples left out because an earlier one has the same content.
        leaked_lines: Number of lines of plain text left out of validation because training has them too.
    """

    train: list[Example]
    validation: list[Example]
    duplicates: int
    leaked_lines: int


def split_examples(examples: Sequence[Example], *, fraction: float, seed: int) -> Sides:
    """Split examples by group, after leaving out copies.

    Conversations with the same question (the text before the first answer) are one group, so that no answer of validation was learnt. The
    split depends on groups, contents and the seed, and on no path: a run may be resumed on a copy of the data.

    Raises:
        ValueError: If there are fewer than two groups.
    """
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(_normal(example.content), example)
    kept = list(first.values())
    texts = [example for example in kept if example.text]
    asked = [example for example in kept if not example.text]
    train, validation = _split_asked(asked, fraction=fraction, seed=seed) if asked else ([], [])
    leaked = 0
    if texts:
        documents = [Document(group=_group(one), text=one.text) for one in texts]
        places = {document.group: one.where for document, one in zip(documents, texts, strict=True)}
        parts = split(documents, fraction=fraction, seed=seed)
        train += [Example(where=places[one.group], text=one.text) for one in parts.train]
        validation += [Example(where=places[one.group], text=one.text) for one in parts.validation]
        leaked = parts.dropped_lines
    return Sides(train=train, validation=validation, duplicates=len(examples) - len(kept), leaked_lines=leaked)


def _group(example: Example) -> str:
    """Return the example's group, or one derived from its content.

    The split must not depend on the location of the file.
    """
    return example.group or hashlib.sha256(_normal(example.content).encode()).hexdigest()


def _split_asked(examples: list[Example], *, fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    documents = [Document(group=_group(one), text=one.content, keys=tuple(_questions([one]))) for one in examples]
    groups = [document.group for document in merge_groups(documents)]
    sizes: dict[str, int] = defaultdict(int)
    for group in groups:
        sizes[group] += 1
    if len(sizes) < 2:
        raise ValueError(
            f"{len(examples)} conversation(s) in {len(sizes)} group(s) of one question cannot be parted into training and "
            "validation; at least two groups are needed: add conversations, or give them other groups."
        )
    chosen = choose_groups(sizes, fraction=fraction, seed=seed)
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example, group in zip(examples, groups, strict=True):
        sides[group in chosen].append(example)
    if common := _questions(sides[0]) & _questions(sides[1]):
        raise RuntimeError(f"{len(common)} questions are on both sides; this is a defect of this module.")
    return sides


def fitted(
    examples: Sequence[Example], encode: Callable[[Example], Encoded], *, length: int, too_long: str
) -> tuple[list[Encoded], list[int], int]:
    """Return the encoded examples that fit, the token counts of all, and the number left out.

    Plain texts are divided: a piece begins with the last token of the one before, which it does not score, so each token is scored once.

    Args:
        examples: The examples.
        encode: Returns an example's tokens.
        length: The most tokens of a row, 2 or more.
        too_long: Treatment of a longer conversation: "refuse", "drop" it, or "truncate" it at the end.

    Raises:
        ValueError: If `too_long` is "refuse" and an example is longer; the message names the longest with file and line.
    """
    found: list[Encoded] = []
    lengths: list[int] = []
    long: list[tuple[int, str]] = []
    left_out = 0
    for example in examples:
        encoded = encode(example)
        size = len(encoded.ids)
        lengths.append(size)
        if example.text:
            found += [
                Encoded(encoded.ids[start : start + length], encoded.scored[start : start + length])
                for start in range(0, max(size - 1, 1), length - 1)
            ]
            continue
        if size > length:
            long.append((size, example.where))
            encoded = Encoded(encoded.ids[:length], encoded.scored[:length])
        if size > length and (too_long == "drop" or not encoded.scored[1:].any()):
            left_out += 1
        else:
            found.append(encoded)
    if long and too_long == "refuse":
        long.sort(reverse=True)
        named = ", ".join(f"{where} ({size:,})" for size, where in long[:_NAMED])
        more = f" and {len(long) - _NAMED} more" if len(long) > _NAMED else ""
        raise ValueError(
            f"{len(long)} of {len(lengths)} examples have more than data.sequence_length={length} tokens: {named}{more}; set "
            f"data.sequence_length={long[0][0]} or more, or data.too_long=drop, or data.too_long=truncate to cut off their ends."
        )
    return found, lengths, left_out


def length_histogram(lengths: Sequence[int]) -> dict[int, int]:
    """Return how many lengths lie at or below each power of two, and above the one before."""
    tops = 2 ** np.ceil(np.log2(np.maximum(np.asarray(lengths, dtype=np.int64), 16))).astype(int)
    sizes, counts = np.unique(tops, return_counts=True)
    return {int(size): int(count) for size, count in zip(sizes, counts, strict=True)}


def describe_lengths(lengths: Sequence[int]) -> str:
    """Return the median, the 95th percentile and the largest of lengths in tokens, in words."""
    median, high = (int(np.percentile(lengths, share)) for share in (50, 95))
    return f"median {median:,} tokens, 95 % up to {high:,}, longest {max(lengths):,}"


def _questions(examples: Sequence[Example]) -> set[str]:
    """Return the questions of examples; a conversation that begins with an answer has none."""
    return {question for one in examples if (question := _normal(one.question))}


def _normal(text: str) -> str:
    return " ".join(text.lower().split())
