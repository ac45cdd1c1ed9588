"""Text layout of a diagnostic record: its fields, their order and their tags.

    <s><equipment> Caterpillar 320 Excavator
    <symptom> loses power under load
    <error> P0087, SPN 157
    <cause> low fuel pressure, clogged filter
    <solution> replace filters, bleed, check 280-320 bar</s>

Training and inference share this module, so that a prompt is always the beginning of a training text. Case is kept: P0087 is a
code, and nobody writes p0087. A record without codes has `<error> none`. The diagnostic head predicts at `<error>`, before the model
reads a code, so every record has a prediction.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "NO_CODES",
    "PAD_ID",
    "SPECIAL_TOKENS",
    "Record",
    "answer_offset",
    "parse",
    "prompt",
    "question_offset",
    "render",
]

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<error>", "<symptom>", "<cause>", "<solution>", "<equipment>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NO_CODES = "none"

_TAGS = {
    "<equipment>": "equipment",
    "<symptom>": "symptom",
    "<error>": "error_codes",
    "<cause>": "probable_cause",
    "<solution>": "solution",
}
_ANY_TAG = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One fault as a technician files it; in a question, cause and solution are empty."""

    equipment: str
    symptom: str
    error_codes: tuple[str, ...] = ()
    probable_cause: str = ""
    solution: str = ""

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> "Record":
        """Return the record in a JSON object; unknown keys are ignored.

        Args:
            fields: `equipment` and `symptom`, both required; `error_codes` (a list, or one text with commas),
                `probable_cause`, `solution`.

        Raises:
            ValueError: If a required field is missing or a field is not text.
        """
        if not isinstance(fields, Mapping):
            raise ValueError(f"a record is a JSON object with equipment and symptom; this is {type(fields).__name__}.")  # noqa: TRY004 - a wrong value in a file
        missing = [name for name in ("equipment", "symptom") if not fields.get(name)]
        if missing:
            raise ValueError(
                f"a record needs equipment and symptom; {' and '.join(missing)} missing in {dict(fields)!r}."
            )
        codes = fields.get("error_codes") or ()
        if isinstance(codes, str):
            codes = codes.split(",")
        if not isinstance(codes, Sequence):
            raise ValueError(f"error_codes is {codes!r}; it is a list of texts, or one text with commas.")  # noqa: TRY004 - a wrong value in a file
        texts = {name: fields.get(name) or "" for name in ("equipment", "symptom", "probable_cause", "solution")}
        for name, value in (*texts.items(), *(("error_codes", code) for code in codes)):
            if not isinstance(value, str):
                raise ValueError(f"{name} is {value!r}; it must be text.")  # noqa: TRY004 - a wrong value in a file
        return cls(error_codes=tuple(code.strip() for code in codes if code.strip()), **texts)


def render(record: Record) -> str:
    """Return the whole text of `record`, from `<s>` to `</s>`.

    Raises:
        ValueError: If a field contains a tag, which would start another field.
    """
    return f"{_question(record)} {_line(record.probable_cause)}\n<solution> {_line(record.solution)}</s>"


def prompt(record: Record) -> str:
    """Return the prompt: the text up to and including `<cause>`.

    Raises:
        ValueError: If a field contains a tag.
    """
    return _question(record)


def question_offset(text: str) -> int | None:
    """Return the position after `<error>`, where the diagnostic head predicts, or None."""
    start = text.find("<error>")
    return None if start < 0 else start + len("<error>")


def answer_offset(text: str) -> int | None:
    """Return the position after `<cause>`, where the answer begins, or None."""
    start = text.find("<cause>")
    return None if start < 0 else start + len("<cause>")


def parse(text: str) -> dict[str, Any]:
    """Return the fields found in `text`, under the names of `Record`.

    A field that is absent is empty. The first occurrence of a field counts, and `</s>` ends the record, so repeated
    tags after it have no effect.
    """
    fields: dict[str, Any] = dict.fromkeys(_TAGS.values(), "")
    seen = set()
    matches = list(_ANY_TAG.finditer(text))
    for match, following in zip(matches, [*matches[1:], None], strict=True):
        if match.group() == "</s>":
            break
        name = _TAGS.get(match.group())
        if name is None or name in seen:
            continue
        seen.add(name)
        fields[name] = " ".join(text[match.end() : following.start() if following else len(text)].split())
    codes = fields["error_codes"]
    fields["error_codes"] = (
        [] if codes in {"", NO_CODES} else [code.strip() for code in codes.split(",") if code.strip()]
    )
    return fields


def _question(record: Record) -> str:
    codes = ", ".join(_line(code) for code in record.error_codes) or NO_CODES
    return f"<s><equipment> {_line(record.equipment)}\n<symptom> {_line(record.symptom)}\n<error> {codes}\n<cause>"


def _line(field: str) -> str:
    if found := _ANY_TAG.search(field):
        raise ValueError(
            f"{found.group()} stands inside a field ({field!r}); tags mark fields, remove it from the text."
        )
    return " ".join(field.split())
