"""Fault codes in texts: positions, rows of the error table, and subsystems.

Three families are read. OBD-II (SAE J2012): a letter P, B, C or U, a digit 0 to 3 and three hexadecimal digits. J1939 and
J1587: a keyword (SPN, FMI, MID, PID, SID, PSID, PPID, CID, EID) and a number, joined or apart. Vendors' own: `E1234`
(four or five digits) and letters-hyphen-digits such as `HYD-204`. A compound such as `SPN157 FMI 3` is two codes side by side: the
model adds the embeddings of the parameter and of the failure mode, so that training need not contain each pair.

The 9,999 ids of the table, 0 being "no code":

    1     - 1000   P0000 - P0999     generic powertrain, decimal digits
    1001  - 2000   P2000 - P2999
    2001  - 3000   U0000 - U0999     network
    3001  - 4000   C0000 - C0999     chassis
    4001  - 5000   B0000 - B0999     body
    5001  - 5032   FMI 0 - 31
    5033  - 7032   SPN 0 - 1999
    7033  - 8032   SPN 3000 - 3999
    8033  - 8288   MID 0 - 255
    8289  - 9999   everything else: CRC-32 of the canonical text, modulo 1711; two such codes may share a row

Codes of the listed ranges never share a row. The mapping is arithmetic: the same in every process and on every machine.
"""

import re
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "NUM_CODE_IDS",
    "NUM_SUBSYSTEMS",
    "Code",
    "align",
    "canonical",
    "find",
    "parse",
    "subsystem",
    "subsystem_name",
]

NUM_CODE_IDS = 10_000
NUM_SUBSYSTEMS = 64

_LETTERS = "PBCU"
_KEYWORDS = "SPN|FMI|MID|PSID|PPID|PID|SID|CID|EID"
_PATTERN = re.compile(
    rf"""(?<![A-Za-z0-9])(?:
        (?P<obd>(?i:[PBCU][0-3][0-9A-F]{{3}}))(?![A-Za-z0-9])
      | (?P<keyword>(?i:{_KEYWORDS}))[ \t]*[-:\#]?[ \t]*(?P<number>\d{{1,6}})(?!\d)
      | (?P<event>E-?\d{{4,5}})(?![A-Za-z0-9])
      | (?P<vendor>(?!ISO-|SAE-|API-|DIN-)[A-Z]{{2,6}}-\d{{2,4}})(?![A-Za-z0-9])
    )
    | (?<=\d)(?P<joined>(?i:FMI))[ \t]*[-:\#]?[ \t]*(?P<joined_number>\d{{1,2}})(?!\d)""",
    re.VERBOSE,
)

_OBD_RANGES = {"P0": 1, "P2": 1001, "U0": 2001, "C0": 3001, "B0": 4001}
_NUMBER_RANGES = (("FMI", 0, 32, 5001), ("SPN", 0, 2000, 5033), ("SPN", 3000, 4000, 7033), ("MID", 0, 256, 8033))
_FIRST_HASHED = 8289
_NUM_HASHED = NUM_CODE_IDS - _FIRST_HASHED

# SPN -> the third character's group of the OBD code that reports the same part (SAE J1939-73 beside SAE J2012).
_SPN_GROUPS = {
    27: "P4", 51: "P2", 52: "P1", 84: "P5", 91: "P1", 94: "P0", 97: "P2", 98: "P5", 100: "P5", 102: "P2", 103: "P2",
    105: "P1", 107: "P1", 108: "P1", 110: "P1", 111: "P1", 127: "P7", 157: "P0", 158: "P5", 164: "P0", 167: "P6",
    168: "P5", 171: "P0", 172: "P1", 174: "P1", 175: "P1", 177: "P7", 190: "P3", 191: "P7", 412: "P4", 629: "P6",
    636: "P3", 637: "P3", 639: "U0", 651: "P2", 652: "P2", 653: "P2", 654: "P2", 655: "P2", 656: "P2", 1347: "P0",
    1569: "P2", 1761: "P0", 3031: "P0", 3216: "P2", 3226: "P2", 3251: "P4", 3361: "P0", 3364: "P0", 3719: "P4",
}  # fmt: skip

_FAMILIES = {"P": "powertrain", "B": "body", "C": "chassis", "U": "network"}
_POWERTRAIN_GROUPS = (
    "fuel, air and auxiliary emission control",
    "fuel and air metering",
    "injector circuit and boost",
    "ignition, misfire and engine speed",
    "auxiliary emission control",
    "vehicle speed, idle and auxiliary inputs",
    "control unit and outputs",
    "transmission",
    "transmission",
    "transmission",
    "hybrid drive",
    "hybrid drive",
    "hybrid drive",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """One code found in a text.

    Attributes:
        text: The canonical spelling: `P0087`, `SPN 157`, `E1234`.
        start: First character of the code in the text it was found in.
        end: One past its last character.
        id: Its row of the error table, 1 to 9999.
    """

    text: str
    start: int
    end: int
    id: int


def parse(text: str) -> list[Code]:
    """Return every code in `text`, from left to right, without overlaps."""
    found = []
    for match in _PATTERN.finditer(text):
        spelling = _spell(match)
        found.append(Code(text=spelling, start=match.start(), end=match.end(), id=_row(spelling)))
    return found


def find(text: str) -> list[tuple[int, int, int]]:
    """Return `(start, end, id)` of every code in `text`.

    The positions are aligned with a tokenizer's offsets later.
    """
    return [(code.start, code.end, code.id) for code in parse(text)]


def align(text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the error-table row of each token: a code's row at its last token, 0 elsewhere.

    At the first token of a code, its row would give away the tokens that follow.

    Args:
        text: The text that was tokenized.
        offsets: First character of each token and one past its last, as a tokenizer returns them.
    """
    rows = [0] * len(offsets)
    starts = [start for start, _ in offsets]
    for _, end, row in find(text):
        rows[bisect_right(starts, end - 1) - 1] = row
    return rows


def canonical(code: str) -> str:
    """Return the canonical spelling of `code`; for an unknown notation, only normalise blanks.

    Raises:
        ValueError: If `code` is blank.
    """
    spelling = " ".join(code.split())
    if not spelling:
        raise ValueError("an error code is blank; give for example P0087 or SPN 157, or leave the list empty.")
    parts = parse(spelling)
    covered = bool(parts) and parts[0].start == 0 and parts[-1].end == len(spelling)
    return " ".join(part.text for part in parts) if covered else spelling


def subsystem(code: str) -> int:
    """Return the class of `code` for the diagnostic head, 0 to 63.

    OBD-II: 16 x the place of its letter in PBCU + its third character read as a hexadecimal digit (the subsystem of SAE
    J2012). SPNs of the common engine parameters share the class of the OBD code for the same part. All others: CRC-32 of
    the canonical text, modulo 64.

    Raises:
        ValueError: If `code` is blank.
    """
    spelling = canonical(code)
    parts = parse(spelling)
    first = parts[0].text if parts and parts[0].start == 0 else spelling
    if re.fullmatch(r"[PBCU][0-3][0-9A-F]{3}", first):
        return _LETTERS.index(first[0]) * 16 + int(first[2], 16)
    if first.startswith("SPN ") and (group := _SPN_GROUPS.get(int(first[4:]))):
        return _LETTERS.index(group[0]) * 16 + int(group[1], 16)
    return zlib.crc32(first.encode()) % NUM_SUBSYSTEMS


def subsystem_name(index: int) -> str:
    """Return the name of a class of the diagnostic head.

    An example is `"powertrain P_3: ignition, misfire and engine speed"`.

    Raises:
        ValueError: If `index` is not 0 to 63.
    """
    if not 0 <= index < NUM_SUBSYSTEMS:
        raise ValueError(f"subsystem {index} does not exist; there are {NUM_SUBSYSTEMS}, 0 to {NUM_SUBSYSTEMS - 1}.")
    letter, group = _LETTERS[index // 16], index % 16
    name = f"{_FAMILIES[letter]} {letter}_{group:X}"
    if letter == "P" and group < len(_POWERTRAIN_GROUPS):
        name += f": {_POWERTRAIN_GROUPS[group]}"
    return name


def _spell(match: re.Match[str]) -> str:
    if match["obd"]:
        return match["obd"].upper()
    if keyword := match["keyword"] or match["joined"]:
        return f"{keyword.upper()} {int(match['number'] or match['joined_number'])}"
    return (match["event"] or "").replace("-", "") or match["vendor"]


def _row(spelling: str) -> int:
    if (first := _OBD_RANGES.get(spelling[:2])) and re.fullmatch(r"[PBCU]\d{4}", spelling):
        return first + int(spelling[2:])
    keyword, _, number = spelling.partition(" ")
    if number.isascii() and number.isdigit():
        for name, low, high, first in _NUMBER_RANGES:
            if keyword == name and low <= int(number) < high:
                return first + int(number) - low
    return _FIRST_HASHED + zlib.crc32(spelling.encode()) % _NUM_HASHED
