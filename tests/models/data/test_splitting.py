"""Training and validation share no group and no line.

The order of the documents does not matter.
"""

import random
from dataclasses import replace

import pytest

from lightning_unified.data.documents.document import Document
from lightning_unified.data.documents.record import Record
from lightning_unified.data.sources import corpora
from lightning_unified.data.splitting import Split, merge_groups, ordered_groups, split


def text(group, content, keys=()):
    return Document(group=group, text=content, keys=keys)


def record(group, symptom, cause, code="P0001"):
    return Document(
        group=group, record=Record(equipment="car", symptom=symptom, error_codes=(code,), probable_cause=cause)
    )


def lines(documents):
    return {" ".join(line.split()) for document in documents for line in document.text.splitlines()} - {""}


def many():
    return [text(f"g{number // 2}", f"line of {number}\nshared line\n\nend of {number}") for number in range(40)]


def test_no_group_and_no_line_is_on_both_sides():
    parts = split(many(), fraction=0.2, seed=0)

    assert not {d.group for d in parts.train} & {d.group for d in parts.validation}
    assert not lines(parts.train) & lines(parts.validation)
    assert parts.validation


def test_the_python_topics_are_parted_without_a_common_line():
    parts = split(corpora.pydoc(), fraction=0.1, seed=0)

    assert not lines(parts.train) & lines(parts.validation)
    assert parts.dropped_lines < parts.validation_lines / 10


def test_linking_topics_by_their_paragraphs_saves_most_of_what_would_be_dropped():
    linked = corpora.pydoc()
    loose = [replace(document, keys=()) for document in linked]
    dropped = [
        sum(split(documents, fraction=0.1, seed=seed).dropped_lines for seed in range(5))
        for documents in (linked, loose)
    ]

    assert dropped[1] > 4 * dropped[0]


def test_dropped_lines_are_counted_and_the_rest_is_kept():
    parts = split(many(), fraction=0.2, seed=0)
    groups = {d.group for d in parts.validation}
    before = [d for d in many() if d.group in groups]

    assert parts.dropped_lines == len(before)
    assert parts.validation_lines == 3 * len(before)
    assert lines(parts.validation) == lines(before) - {"shared line"}
    assert parts.dropped_bytes == parts.validation_bytes - sum(len(d.content) for d in parts.validation) > 0


def test_the_line_about_a_split_names_dropped_lines_if_there_are_any():
    sides = {"train": [text("a", "x")], "validation": [text("b", "y")], "validation_bytes": 2, "dropped_bytes": 0}
    words = {"train": "9 rows", "validation": "3 rows"}

    assert [
        Split(validation_lines=1200, dropped_lines=dropped, **sides).describe_line(**words) for dropped in (0, 1100)
    ] == [
        "1 documents to train, 9 rows; 1 to validate, 3 rows",
        "1 documents to train, 9 rows; 1 to validate, 3 rows, without 1,100 of 1,200 lines that training has",
    ]


def test_the_split_does_not_depend_on_the_order_of_documents():
    shuffled = many()
    random.Random(1).shuffle(shuffled)
    first, second = split(many(), fraction=0.2, seed=0), split(shuffled, fraction=0.2, seed=0)

    assert {d.text for d in first.validation} == {d.text for d in second.validation}


def test_the_seed_draws_the_groups():
    first, second = split(many(), fraction=0.2, seed=0), split(many(), fraction=0.2, seed=1)

    assert {d.group for d in first.validation} != {d.group for d in second.validation}


def test_validation_has_about_its_share_of_bytes_and_passes_over_a_huge_group():
    documents = [*many(), text("huge", "\n".join(f"huge {number}" for number in range(2000)))]
    for seed in range(10):
        parts = split(documents, fraction=0.1, seed=seed)
        assert "huge" not in {d.group for d in parts.validation}


def test_groups_with_a_common_key_are_one_group():
    chain = [text("c", "1", ("x",)), text("b", "2", ("x", "y")), text("a", "3", ("y",)), text("d", "4", ("z",))]

    assert [d.group for d in merge_groups(chain)] == ["a", "a", "a", "d"]
    assert {d.text: d.group for d in merge_groups(chain[::-1])} == {d.text: d.group for d in merge_groups(chain)}


def test_a_record_that_differs_in_code_and_equipment_only_counts_as_the_same_line():
    others = [record(f"g{number}", f"symptom {number}", "cause") for number in range(9)]
    copies = [record("copy", f" Symptom  {number}", "Cause", code="P0999") for number in range(9)]
    documents = [*others, *copies, record("copy", "another symptom", "cause")]
    parts = split(documents, fraction=0.5, seed=_seed_for("copy", others))

    assert "copy" in {document.group for document in parts.validation}
    assert parts.dropped_lines == len(parts.train)
    kept = {" ".join(document.record.symptom.lower().split()) for document in parts.validation}
    assert not kept & {document.record.symptom.lower() for document in parts.train}


def _seed_for(group, others):
    """Return a seed that draws `group` first."""
    names = {group, *(d.group for d in others)}
    return next(seed for seed in range(1000) if ordered_groups(names, seed=seed)[0] == group)


def test_two_groups_suffice_and_one_is_refused():
    pair = [text("a", "first"), text("b", "second")]
    assert len(split(pair, fraction=0.1, seed=0).validation) == 1

    with pytest.raises(ValueError, match=r"2 document\(s\) in 1 group\(s\).*at least two groups"):
        split([text("a", "first"), text("a", "second")], fraction=0.1, seed=0)


def test_copies_under_different_groups_are_refused():
    with pytest.raises(ValueError, match="every one of the 1 validation lines also occurs in training"):
        split([text("a", "same"), text("b", "same")], fraction=0.1, seed=0)
