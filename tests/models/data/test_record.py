"""The text of a record."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_unified.data.documents import record as layout

RECORD = layout.Record(
    equipment="Caterpillar 320 Excavator",
    symptom="loses power under load",
    error_codes=("P0087", "SPN 157"),
    probable_cause="low fuel pressure, clogged filter",
    solution="replace filters, bleed",
)


def test_each_field_has_its_line():
    assert layout.render(RECORD) == (
        "<s><equipment> Caterpillar 320 Excavator\n<symptom> loses power under load\n<error> P0087, SPN 157\n"
        "<cause> low fuel pressure, clogged filter\n<solution> replace filters, bleed</s>"
    )


def test_special_tokens_have_the_ids_0_to_8():
    assert layout.SPECIAL_TOKENS[:4] == ("<pad>", "<s>", "</s>", "<unk>")
    assert layout.SPECIAL_TOKENS[4:] == ("<error>", "<symptom>", "<cause>", "<solution>", "<equipment>")
    assert [layout.SPECIAL_TOKENS[row] for row in (layout.PAD_ID, layout.BOS_ID, layout.EOS_ID)] == [
        "<pad>",
        "<s>",
        "</s>",
    ]


def test_a_prompt_is_the_beginning_of_the_text():
    text = layout.render(RECORD)
    assert text.startswith(layout.prompt(RECORD))
    assert layout.answer_offset(text) == len(layout.prompt(RECORD))


def test_the_question_is_asked_before_any_code_is_read():
    text = layout.render(RECORD)
    end = layout.question_offset(text)
    assert text[:end].endswith("<error>")
    assert "P0087" not in text[:end]


def test_a_record_without_codes_says_none_and_reads_back_empty():
    bare = dataclasses.replace(RECORD, error_codes=())
    assert "\n<error> none\n" in layout.render(bare)
    assert layout.parse(layout.render(bare))["error_codes"] == []


_words = st.text(
    alphabet=st.characters(exclude_characters="<>,", exclude_categories=("Cs", "Cc", "Z")), min_size=1
).filter(lambda text: text != layout.NO_CODES)


@given(
    st.builds(
        layout.Record,
        equipment=_words,
        symptom=_words,
        error_codes=st.lists(_words).map(tuple),
        probable_cause=_words,
        solution=_words,
    )
)
def test_what_was_rendered_is_parsed(record):
    assert layout.parse(layout.render(record)) == {
        **dataclasses.asdict(record),
        "error_codes": list(record.error_codes),
    }


def test_text_after_the_end_changes_nothing():
    fields = layout.parse(layout.render(RECORD) + "<cause> another")
    assert fields["probable_cause"] == RECORD.probable_cause


def test_the_first_of_two_causes_counts():
    assert layout.parse("<cause> one\n<cause> two")["probable_cause"] == "one"


def test_a_tag_inside_a_field_is_refused():
    with pytest.raises(ValueError, match="<cause> stands inside a field"):
        layout.prompt(dataclasses.replace(RECORD, symptom="x <cause> y"))


@pytest.mark.parametrize("given", [["P0087", " SPN 157 ", ""], "P0087, SPN 157"])
def test_codes_come_as_a_list_or_as_one_text(given):
    record = layout.Record.from_mapping(
        {"equipment": "e", "symptom": "s", "error_codes": given, "diagnostic_steps": []}
    )
    assert record.error_codes == ("P0087", "SPN 157")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"equipment": "e"}, "symptom missing"),
        ({}, "equipment and symptom missing"),
        ([], "a record is a JSON object"),
        ({"equipment": "e", "symptom": 3}, "symptom is 3; it must be text"),
        ({"equipment": "e", "symptom": "s", "error_codes": 7}, "error_codes is 7"),
        ({"equipment": "e", "symptom": "s", "error_codes": [7]}, "error_codes is 7; it must be text"),
    ],
)
def test_a_record_that_is_none_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        layout.Record.from_mapping(fields)
