"""Fault codes of cars as diagnostic records, from the installed package elm327obd.

The package's licence is GPL-2.0-or-later. The package is read at run time and its code is never imported; this repository
contains none of its text. It gives two kinds of record:

- a code of the guide: symptom = the guide's summary, cause = its causes (likeliest first), solution = its checks and a
  sentence, written here, for its severity;
- any code with a description: symptom = the part the description names, cause = the whole description. The solution is empty,
  since the package describes no repair there.

Groups: the ten codes that differ in the last digit (P030x) are a family. Families that a guide entry covers together are one
group. So are families with descriptions that differ in numbers and single letters only (cylinder 1 and 2, bank A and B).
"""

import re
import tomllib
from collections.abc import Iterator

from lightning_unified.data.documents.document import Document, installed_files
from lightning_unified.data.documents.record import Record

__all__ = ["documents"]

_EQUIPMENT = {
    "P": "Passenger car (OBD-II), powertrain",
    "B": "Passenger car (OBD-II), body",
    "C": "Passenger car (OBD-II), chassis",
    "U": "Passenger car (OBD-II), network",
}
_URGENCY = {
    "stop": "Do not drive on before this is repaired.",
    "soon": "Repair within days; waiting does damage.",
    "monitor": "Watch it and repair at the next service.",
    "low": "No hurry; the emissions test will fail.",
}
_FAILURE_WORDS = re.compile(
    r"[\s/,-]*\(?\b(?:circuit|low|high|open|closed|range|performance|intermittent|erratic|input|voltage|signal|malfunction|"
    r"detected|electrical)\b\)?$",
    re.IGNORECASE,
)


def documents() -> list[Document]:
    """Return the guide's records, then the code list's, in the order of their codes.

    Raises:
        FileNotFoundError: If elm327obd is not installed or lacks its two data files.
    """
    files = installed_files("elm327obd", source="dtc")
    try:
        guide = tomllib.loads(files["elm327obd/dtc_guide.toml"].read_text(encoding="utf-8"))["entry"]
        table = files["elm327obd/data/python_obd_dtc.tsv"].read_text(encoding="utf-8")
    except KeyError as error:
        raise FileNotFoundError(
            f"the installed elm327obd has no {error}; source=dtc was written for version 0.1.1: "
            "pip install --no-deps elm327obd==0.1.1"
        ) from error
    descriptions = dict(_rows(table))
    return [*_guide_documents(guide, descriptions), *_code_documents(descriptions)]


def _guide_documents(guide: list[dict], descriptions: dict[str, str]) -> Iterator[Document]:
    for number, entry in enumerate(guide):
        codes = [code for span in entry["codes"] for code in _expand(span)]
        causes = "; ".join(entry["causes"])
        checks = "; ".join([*entry["checks"], _URGENCY[entry["severity"]]])
        keys = tuple({_family(code) for code in codes})
        for code in codes:
            record = Record(
                equipment=_EQUIPMENT[code[0]],
                symptom=entry["summary"],
                error_codes=(code,),
                probable_cause=f"{descriptions[code]}: {causes}" if code in descriptions else causes,
                solution=checks,
            )
            yield Document(group=f"guide entry {number}", record=record, keys=keys)


def _code_documents(descriptions: dict[str, str]) -> Iterator[Document]:
    for code, description in sorted(descriptions.items()):
        record = Record(
            equipment=_EQUIPMENT[code[0]],
            symptom=f"Fault of: {_part(description)}",
            error_codes=(code,),
            probable_cause=description,
        )
        yield Document(group=_family(code), record=record, keys=(_family(code), _stem(description)))


def _rows(table: str) -> Iterator[tuple[str, str]]:
    """Yield codes with descriptions; codes that the standard only reserves are left out."""
    for line in table.splitlines():
        code, _, description = line.partition("\t")
        if re.fullmatch(r"[PBCU][0-9A-F]{4}", code) and not description.lower().startswith("reserved"):
            yield code, " ".join(description.split())


def _expand(span: str) -> list[str]:
    first, _, last = span.partition("-")
    if not last:
        return [first]
    return [f"{first[0]}{number:04X}" for number in range(int(first[1:], 16), int(last[1:], 16) + 1)]


def _family(code: str) -> str:
    return f"family {code[:4]}x"


def _part(description: str) -> str:
    """Return the component that a description names.

    Trailing words of failure are removed, unless nothing else is left.
    """
    part = description
    while (shorter := _FAILURE_WORDS.sub("", part).rstrip(" /-,(")) not in {part, ""}:
        part = shorter
    return part


def _stem(description: str) -> str:
    return "stem " + " ".join(re.findall(r"[a-z]{2,}", description.lower()))
