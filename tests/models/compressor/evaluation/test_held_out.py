"""What is evaluated on was held out of what is counted on, and one text is one group."""

import pytest

from lightning_unified.data.documents.document import Document
from lightning_unified.models.compressor.evaluation import held_out

SETTINGS = {"source": "pydoc", "path": None, "val_fraction": 0.1, "seed": 0, "max_groups": None, "batch_size": 32}


def test_the_two_sides_have_no_line_in_common():
    corpus, texts = held_out.sides(SETTINGS)
    lines = {line for text in corpus for line in text.splitlines() if line.strip()}

    assert len(corpus) > len(texts) >= 2
    assert not any(line in lines for text in texts for line in text.splitlines() if line.strip())


def test_documents_of_one_group_are_one_text():
    documents = [Document(group="a", text="one"), Document(group="b", text="two"), Document(group="a", text="three")]

    assert sorted(held_out.by_group(documents)) == ["one\n\nthree", "two"]


def test_data_that_is_not_described_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"val_fraction, seed missing.*--data and --corpus"):
        held_out.sides({"source": "pydoc"})


def test_a_file_is_read_and_a_name_that_is_nothing_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("The pump leaks at the seal.\n\nRenew the seal.\n")

    assert "The pump leaks" in " ".join(held_out.read(str(tmp_path / "text.txt")))
    with pytest.raises(FileNotFoundError, match="neither a file, a folder, nor one of the sources"):
        held_out.read("pidoc")
