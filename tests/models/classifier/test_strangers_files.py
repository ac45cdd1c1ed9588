"""Files of strangers are read well, or refused by one line that says what to do.

The line about the data names what was left out.
"""

import csv
import io
import json
import re

import pytest

from lightning_unified.models.classifier import LabelData

KINDS = {"complaint": "broken", "praise": "lovely", "question": "which"}
NOUNS = ("printer", "monitor", "scanner", "laptop", "router", "keyboard", "camera", "headset", "cable", "phone")


def rows(count=30, kinds=tuple(KINDS)):
    """Return texts that are no near copies of each other, and their class."""
    made = []
    for place in range(count):
        kind = kinds[place % len(kinds)]
        nouns = [NOUNS[(place * step + step) % len(NOUNS)] for step in (1, 3, 7)]
        made.append((f"{KINDS.get(kind, kind)} {nouns[0]} no {place} and {nouns[1]} {place * 7} {nouns[2]}", kind))
    return made


def table(given, *, delimiter=",", names=("text", "label"), **options):
    written = io.StringIO()
    writer = csv.writer(written, delimiter=delimiter, **options)
    writer.writerows([*([names] if names else []), *given])
    return written.getvalue()


def jsonl(given):
    return "\n".join(json.dumps({"text": text, "label": label}) for text, label in given)


def made(folder, name, content, **settings):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return LabelData(source="files", path=str(path), pretrained=None, vocab_size=300, batch_size=8, **settings)


OWN = {"text_column": "message", "label_column": "kind"}
BY_NUMBER = {"text_column": 5, "label_column": 0}
SENTIMENT140 = [
    (4 if kind == "praise" else 0, place, "Mon", "NO_QUERY", "user", f'{text} für, "me"')
    for place, (text, kind) in enumerate(rows())
]
READ_WELL = {
    "a mark, semicolons and own names": ("a.csv", table(rows(), delimiter=";", names=("message", "kind")).encode("utf-8-sig"), OWN, "30 rows read"),
    "tabs in a csv": ("a.csv", table(rows(), delimiter="\t"), {}, "30 rows read"),
    "bars": ("a.csv", table(rows(), delimiter="|"), {}, "30 rows read"),
    "Excel's line of the delimiter": ("a.csv", "sep=;\n" + table(rows(), delimiter=";"), {}, "30 rows read"),
    "utf-16": ("a.csv", table(rows(), delimiter="\t").encode("utf-16"), {}, "30 rows read"),
    "an upper-case suffix, names in spaces": ("A.CSV", table(rows(), names=(" text", "label ")), {}, "30 rows read"),
    "quoted ends of lines": ("a.csv", table([(f"{text}\nsecond, line", kind) for text, kind in rows()]), {}, "30 rows read"),
    "ends of lines of old Macs": ("a.csv", table(rows(), lineterminator="\r"), {}, "30 rows read"),
    "latin-1, said": ("a.csv", table([(f"{text} für", kind) for text, kind in rows()]).encode("latin-1"), {"encoding": "latin-1"}, "30 rows read"),
    "Sentiment140": ("a.csv", table(SENTIMENT140, names=None, quoting=csv.QUOTE_ALL).encode("latin-1"), {**BY_NUMBER, "encoding": "latin-1"}, "30 rows read.*2 classes: 0 14, 4 7"),
    "empty trailing fields": ("a.csv", table([(*row, "", "") for row in rows()]), {}, "30 rows read"),
    "numbers as labels": ("a.csv", table([(text, len(kind)) for text, kind in rows()]), {}, "3 classes: 6 7, 8 7, 9 7"),
    "blank texts and labels": ("a.csv", table([*rows(), (" ", "praise"), ("a text without one", ""), ("", "")]), {}, "32 rows read, left out 1 blank, 1 without a label;"),
    "copies": ("a.csv", table([*rows(), *rows()[:3]]), {}, "33 rows read, left out 3 duplicates;"),
    "copies of another class": ("a.csv", table([*rows(), (rows()[0][0], "praise")]), {}, "left out 1 duplicates;.*1 duplicates had another class"),
    "twelve classes": ("a.csv", table(rows(96, tuple("abcdefghijkl"))), {}, "12 classes: a"),
    "twelve classes of four rows": ("a.csv", table(rows(48, tuple("abcdefghijkl"))), {}, "48 rows read.*12 classes"),
    "a class of one row": ("a.csv", table([*rows(), ("something rare happened here", "rare")]), {}, "4 classes:.*no validation row of rare"),
    "classes that differ in case": ("a.csv", table([*rows(), *[(f"{text} again {text}", "Praise") for text, _ in rows(9)]]), {}, "'Praise' and 'praise' differ only in case"),
    "very long texts": ("a.csv", table([(f"{text} word" * (4_000 if place == 7 else 40), kind) for place, (text, kind) in enumerate(rows(15))]), {}, "15 truncated at 128 tokens"),
    "jsonl with null": ("a.jsonl", jsonl([*rows(), (None, "praise"), ("unknown", None)]), {}, "32 rows read, left out 1 blank, 1 without a label"),
    "jsonl with numbers and truth": ("a.jsonl", jsonl([(text, [1.0, 2, True][place % 3]) for place, (text, _) in enumerate(rows())]), {}, "3 classes: 1 7, 2 7, true 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ_WELL)
def test_a_strangers_file_is_read_and_the_line_about_it_says_how(tmp_path, name):
    file, content, settings, message = READ_WELL[name]
    data = made(tmp_path, file, content, **settings)
    line = data.describe_line()

    assert re.search(message, line), line
    assert "\n" not in line
    assert len(data.train_dataloader()) >= 1
    assert len(data.val_dataloader()) >= 1


REFUSED = {
    "own names": ("a.csv", table(rows(), names=("message", "kind")), {}, r"columns message, kind and no text and no label; name the column, as in data.text_column=message data.label_column=kind\."),
    "another case": ("a.csv", table(rows(), names=("Text", "Label")), {}, "data.text_column=Text data.label_column=Label"),
    "no line of names": ("a.csv", table(rows(), names=None), {}, "Numbers from 0 name the columns of a table without a line of names"),
    "a number too high": ("a.csv", table(rows(), names=None), BY_NUMBER, "data.text_column=5: .*has 2 columns, numbered from 0"),
    "a name and a number": ("a.csv", table(rows()), {"text_column": 0}, "mix a name and a number"),
    "one column for both": ("a.csv", table(rows()), {"label_column": "text"}, "are one column; give two"),
    "a column twice": ("a.csv", table([(*row, "x") for row in rows()], names=("text", "label", "text")), {}, "column text 2 times; rename"),
    "latin-1, not said": ("a.csv", table([("für", "praise")]).encode("latin-1"), {}, r"a.csv:2: not utf-8 at byte 13; save the file as UTF-8, or name its encoding, as in data.encoding=cp1252"),
    "utf-16 without a mark": ("a.csv", table(rows()).encode("utf-16-le"), {}, "a NUL character.*data.encoding=utf-16"),
    "an unknown encoding": ("a.csv", table(rows()), {"encoding": "utf8000"}, "data.encoding=utf8000 is no encoding that Python knows"),
    "a workbook": ("a.csv", b"PK\x03\x04rest", {}, "zip archive, such as an Excel workbook, and no text"),
    "an open quote": ("a.csv", 'text,label\nfirst,a\n"second,b\nthird,a\n', {}, "a.csv:3: a field begins with a quote and does not end with one"),
    "a stray quote": ("a.csv", 'text,label\nfirst,a\n"second" one,b\n', {}, "a.csv:3: a field begins with a quote"),
    "a delimiter in a text": ("a.csv", "text,label\nyes, please,a\n", {}, "a.csv:2: the row has 3 fields and the first line 2; put a field that contains ',' within quotes"),
    "a short row": ("a.csv", "text,label\nonly a text\n", {}, "a.csv:2: the row has 1 of 2 fields and no label"),
    "one class": ("a.csv", table([(text, "praise") for text, _ in rows()]), {}, "only the class praise to learn: 30 of 30 rows"),
    "no label at all": ("a.csv", table([(text, "") for text, _ in rows()]), {}, r"only the class \(none\) to learn: 0 of 30 rows have a text and a label"),
    "three rows": ("a.csv", table(rows(3)), {}, "3 texts in 3 groups leave nothing for test.*give more texts"),
    "ratings as labels": ("a.csv", table([(text, place / 7) for place, (text, _) in enumerate(rows())]), {}, "30 texts have 30 different labels, such as.*these name no classes"),
    "columns swapped": ("a.csv", table(rows()), {"text_column": "label", "label_column": "text"}, "different labels, such as '.*these name no classes"),
    "only copies": ("a.csv", table([rows()[0]] * 20 + [rows()[1]]), {}, "leave nothing for test"),
    "no rows": ("a.csv", "text,label\n", {}, "has no rows; give some"),
    "an empty file": ("a.csv", "", {}, "is empty; its first line must name the columns"),
    "another suffix": ("a.xlsx", b"", {}, "none of .csv, .tsv, .jsonl; convert it"),
    "a key that jsonl lacks": ("a.jsonl", '{"message": "x", "kind": "a"}\n', {}, "a.jsonl:1: no text; its keys are message, kind: name the one to read by data.text_column="),
    "a text that is a number": ("a.jsonl", '{"text": 3, "label": "a"}\n', {}, "a.jsonl:1: text=3; it must be a text"),
    "a label that is a list": ("a.jsonl", '{"text": "x", "label": ["a"]}\n', {}, "name or the number of a class"),
    "another split": ("a.csv", table([(*rows()[0], "dev")], names=("text", "label", "split")), {}, "split='dev'; it must be train or test"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_train_is_refused_by_one_line(tmp_path, name):
    file, content, settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        made(tmp_path, file, content, **settings).setup()
    assert "\n" not in str(caught.value)


def test_a_folder_of_tables_names_them(tmp_path):
    (tmp_path / "train.csv").write_text(table(rows()))
    with pytest.raises(FileNotFoundError, match=r"holds no class/\*\.txt; give one of its files: train\.csv; or make"):
        LabelData(source="files", path=str(tmp_path), pretrained=None).setup()


def test_settings_of_a_file_are_refused_where_no_file_is_read():
    with pytest.raises(ValueError, match=r"data\.source=builtin reads none; leave them out"):
        LabelData(source="builtin", label_column="kind")


def test_rows_fewer_than_a_batch_are_one_batch(tmp_path):
    data = made(tmp_path, "a.csv", table(rows(24)))
    data.batch_size = 64
    data.options = type(data.options)(batch_size=64)

    assert [len(batch["labels"]) for batch in data.train_dataloader()] == [len(data.rows[0])]
