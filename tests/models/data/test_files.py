"""A user's own files: content, grouping, and each mistake by file and line."""

import json

import pytest

from lightning_unified.data.sources.files import read

ROW = {
    "equipment": "pump",
    "symptom": "leaks",
    "error_codes": ["P0001"],
    "probable_cause": "seal",
    "solution": "reseal",
}
BLOCKS = """Problem: leaks at the shaft
  when cold
Equipment: pump
Error Codes: P0001, SPN 157
Cause: worn seal
Solution: reseal
---
Problem: no pressure
Equipment: pump
Error Codes: none
Cause: broken shaft
"""


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_a_jsonl_of_records_groups_rows_of_one_symptom(tmp_path):
    path = write(tmp_path / "a.jsonl", ROW, {**ROW, "symptom": "Leaks"}, {**ROW, "symptom": "hums"}, "")
    documents = read(path)

    assert [document.group for document in documents] == ["leaks", "leaks", "hums"]
    assert documents[0].record.error_codes == ("P0001",)


def test_a_rows_own_group_is_kept(tmp_path):
    path = write(tmp_path / "a.jsonl", {**ROW, "group": "mine"}, {"text": "plain", "group": "other"})

    assert [document.group for document in read(path)] == ["mine", "other"]


def test_a_txt_of_labels_is_records(tmp_path):
    first, second = read(write(tmp_path / "a.txt", BLOCKS))

    assert first.record.symptom == "leaks at the shaft when cold"
    assert first.record.error_codes == ("P0001", "SPN 157")
    assert (first.record.probable_cause, first.record.solution) == ("worn seal", "reseal")
    assert (second.record.error_codes, second.record.solution) == ((), "")


def test_a_plain_txt_is_cut_into_pieces_that_are_its_groups(tmp_path):
    text = "\n\n".join(f"paragraph {number} of a longer text" for number in range(100))
    documents = read(write(tmp_path / "a.txt", text))

    assert len({document.group for document in documents}) == len(documents) == 20
    assert "\n\n".join(document.text for document in documents) == text


def test_a_lone_text_among_records_is_cut_and_the_records_are_kept(tmp_path):
    documents = read(write(tmp_path / "a.jsonl", ROW, {"text": "one\n\ntwo"}, {**ROW, "symptom": "hums"}))

    assert [document.text for document in documents] == ["", "one", "two", ""]


def test_rules_part_a_plain_txt_into_texts(tmp_path):
    documents = read(write(tmp_path / "a.txt", "one\ntwo\n---\n\nthree\n-----\n"))

    assert [document.text for document in documents] == ["one\ntwo", "three"]


def test_a_folder_has_a_group_a_file(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path / "a.jsonl", ROW)
    write(tmp_path / "deep" / "b.txt", "plain")
    write(tmp_path / "ignored.md", "not read")

    assert [document.group for document in read(tmp_path)] == ["a.jsonl", "deep/b.txt"]


MISTAKES = {
    "not JSON": ("a.jsonl", [ROW, "{broken"], r"a\.jsonl:2: not JSON"),
    "not an object": ("a.jsonl", [ROW, "[1]"], r"a\.jsonl:2: a row is an object.*list"),
    "a misspelt field": (
        "a.jsonl",
        [{**ROW, "simptom": "x"}],
        r"a\.jsonl:1: unknown field 'simptom'.*did you mean symptom",
    ),
    "a missing symptom": ("a.jsonl", [{**ROW, "symptom": ""}], r"a\.jsonl:1: .*symptom missing"),
    "a missing cause": ("a.jsonl", ["", {**ROW, "probable_cause": " "}], r"a\.jsonl:2: probable_cause is missing"),
    "a field of another type": ("a.jsonl", [{**ROW, "solution": 3}], r"a\.jsonl:1: solution is 3"),
    "a tag in a field": ("a.jsonl", [{**ROW, "solution": "<cause> x"}], r"a\.jsonl:1: <cause> stands inside a field"),
    "text with other fields": ("a.jsonl", [{"text": "x", "symptom": "y"}], r"a\.jsonl:1: .*remove symptom"),
    "blank text": ("a.jsonl", [{"text": " "}], r"a\.jsonl:1: text is ' '"),
    "a group that is no text": ("a.jsonl", [{**ROW, "group": 1}], r"a\.jsonl:1: group is 1"),
    "an empty file": ("a.jsonl", ["", " "], r"a\.jsonl is empty"),
    "an empty txt": ("a.txt", ["---", ""], r"a\.txt is empty"),
    "a block without equipment": ("a.txt", ["Problem: a", "Cause: b"], r"a\.txt:1: .*equipment missing"),
    "a label twice": ("a.txt", ["Problem: a", "Problem: b"], r"a\.txt:2: Problem occurs twice"),
    "a block without a label": (
        "a.txt",
        ["Problem: a", "Equipment: c", "Cause: b", "---", "loose"],
        r"a\.txt:5: a block begins",
    ),
    "another kind of file": ("a.csv", ["x"], r"a\.csv is neither \.jsonl nor \.txt"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_file_and_line(tmp_path, mistake):
    name, content, message = MISTAKES[mistake]

    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / name, *content))


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad")

    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 at byte 5"):
        read(tmp_path / "a.txt")


def test_paths_with_nothing_to_read_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.path=.*nowhere does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no \.jsonl or \.txt file"):
        read(tmp_path)


def test_a_row_may_hold_the_line_ends_that_json_leaves_as_they_are(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = ['{"text": "one\u2028two\u0085three"}', '{"text": "four"}']
    file.write_text("\r\n".join(rows), encoding="utf-8")

    assert [document.text for document in read(file)] == ["one\u2028two\u0085three", "four"]
