"""Split documents into training and validation by group, without a common line.

A split by row puts near copies on both sides, and the validation loss then measures memorisation. Here a group is on one side
as a whole, and groups that share content are merged first. Lines of validation that training has too are dropped from
validation, counted and reported.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_unified.data.documents.document import Document

__all__ = ["Split", "choose_groups", "merge_groups", "ordered_groups", "split"]

_OVERSHOOT = 1.5  # a group that would take validation beyond this multiple of its share stays in training


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The two sides of a split, and counts of dropped content.

    Attributes:
        train: Training documents.
        validation: Validation documents; they share no group and no line with `train`.
        validation_lines: Lines (records count as one) that the validation groups had before dropping.
        dropped_lines: How many of them occur in training and were dropped.
        validation_bytes: UTF-8 bytes of the validation groups before dropping.
        dropped_bytes: How many of them were dropped.
    """

    train: list[Document]
    validation: list[Document]
    validation_lines: int
    dropped_lines: int
    validation_bytes: int
    dropped_bytes: int

    def describe_line(self, *, train: str, validation: str) -> str:
        """Return one line with the documents of each side and the dropped lines.

        `train` and `validation` describe the rows of their sides.
        """
        sides = f"{len(self.train):,} documents to train, {train}; {len(self.validation):,} to validate, {validation}"
        if not self.dropped_lines:
            return sides
        return f"{sides}, without {self.dropped_lines:,} of {self.validation_lines:,} lines that training has"


def ordered_groups(groups: Iterable[str], *, seed: int) -> list[str]:
    """Return `groups` in a random order that depends only on the names and the seed."""
    return sorted(groups, key=lambda group: (hashlib.sha256(f"{seed}:{group}".encode()).digest(), group))


def merge_groups(documents: list[Document]) -> list[Document]:
    """Merge groups that share a key; a merged group takes the first of its names."""
    parent = {document.group: document.group for document in documents}

    def root(group: str) -> str:
        while parent[group] != group:
            parent[group] = parent[parent[group]]
            group = parent[group]
        return group

    owner: dict[str, str] = {}
    for document in documents:
        for key in document.keys:
            first, second = sorted((root(owner.setdefault(key, document.group)), root(document.group)))
            parent[second] = first
    return [replace(document, group=root(document.group)) for document in documents]


def split(documents: list[Document], *, fraction: float, seed: int) -> Split:
    """Split the documents by group.

    Groups are drawn in random order until validation holds `fraction` of all bytes; a group far too large is skipped. The order of
    `documents` has no effect on the split.

    Args:
        documents: All of them; groups are merged here, see `merge_groups`.
        fraction: Share of bytes for validation, between 0 and 1.
        seed: Draws the groups.

    Raises:
        ValueError: If there are fewer than two groups, or validation is empty after dropping.
    """
    documents = merge_groups(documents)
    sizes: dict[str, int] = defaultdict(int)
    for document in documents:
        sizes[document.group] += len(document.content.encode())
    if len(sizes) < 2:
        raise ValueError(
            f"{len(documents)} document(s) in {len(sizes)} group(s) cannot be parted into training and validation; at least "
            "two groups are needed: add files, or name groups in the rows."
        )
    chosen = choose_groups(sizes, fraction=fraction, seed=seed)
    train = [document for document in documents if document.group not in chosen]
    held_out = [document for document in documents if document.group in chosen]
    return _checked(train, held_out)


def choose_groups(sizes: dict[str, int], *, fraction: float, seed: int) -> set[str]:
    """Return the groups of validation.

    Groups are drawn in random order until they hold `fraction` of the sum of `sizes`; a group far too large is skipped. There is
    always one.
    """
    wanted = fraction * sum(sizes.values())
    order = ordered_groups(sizes, seed=seed)
    chosen: set[str] = set()
    size = 0
    for group in order:
        if size >= wanted:
            break
        if size + sizes[group] <= _OVERSHOOT * wanted:
            chosen.add(group)
            size += sizes[group]
    return chosen or {min(order, key=lambda group: sizes[group])}


def _checked(train: list[Document], held_out: list[Document]) -> Split:
    known = {line for document in train for line in _lines(document)}
    validation = [kept for document in held_out if (kept := _without(document, known))]
    lines = sum(len(_lines(document)) for document in held_out)
    left = sum(len(_lines(document)) for document in validation)
    if not validation:
        raise ValueError(
            f"every one of the {lines} validation lines also occurs in training: the documents are copies of each other; "
            "add different ones, or name groups so that copies stay together."
        )
    if common := {line for document in validation for line in _lines(document)} & known:
        raise RuntimeError(f"{len(common)} validation lines are still in training; this is a defect of this module.")
    if common := {document.group for document in validation} & {document.group for document in train}:
        raise RuntimeError(f"groups {sorted(common)[:3]} are on both sides; this is a defect of this module.")
    before = sum(len(document.content.encode()) for document in held_out)
    return Split(
        train=train,
        validation=validation,
        validation_lines=lines,
        dropped_lines=lines - left,
        validation_bytes=before,
        dropped_bytes=before - sum(len(document.content.encode()) for document in validation),
    )


def _lines(document: Document) -> list[str]:
    """Return the content that must not be on both sides of a split.

    It is a text's lines, or a record's symptom, cause and solution.
    """
    if document.record is None:
        return [words for line in document.text.splitlines() if (words := " ".join(line.split()))]
    record = document.record
    return [" ".join(f"{record.symptom} | {record.probable_cause} | {record.solution}".lower().split())]


def _without(document: Document, known: set[str]) -> Document | None:
    """Remove known lines from a document; None if it is then empty."""
    if document.record is not None:
        return None if _lines(document)[0] in known else document
    kept: list[str] = []
    for line in document.text.splitlines():
        words = " ".join(line.split())
        if words not in known and (words or (kept and kept[-1])):
            kept.append(line)
    text = "\n".join(kept).strip("\n")
    return replace(document, text=text) if text.strip() else None
