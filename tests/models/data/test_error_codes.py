"""Fault codes: what is found in text and which row each has."""

import re

import pytest

from lightning_unified.data.documents import error_codes as codes


def row_of(code):
    (found,) = codes.parse(code)
    return found.id


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("stored P0087, SPN 157", ["P0087", "SPN 157"]),
        ("SPN157 FMI 3", ["SPN 157", "FMI 3"]),
        ("SPN157FMI3", ["SPN 157", "FMI 3"]),
        ("spn:94/fmi-1", ["SPN 94", "FMI 1"]),
        ("FMI 3", ["FMI 3"]),
        ("CID 0168-03", ["CID 168"]),
        ("MID 128 PSID 005", ["MID 128", "PSID 5"]),
        ("E1234 and E-0361", ["E1234", "E0361"]),
        ("HYD-204", ["HYD-204"]),
        ("u0100 p0a80 P0ABC B1000 C0035", ["U0100", "P0A80", "P0ABC", "B1000", "C0035"]),
        ("<P0087>", ["P0087"]),
    ],
)
def test_codes_are_found_in_every_notation(text, found):
    assert [code.text for code in codes.parse(text)] == found


@pytest.mark.parametrize(
    "text", ["paced and ceded", "P4087", "P00871", "XP0087", "ISO-4600", "SAE-30", "E320", "PC200", "FMI", ""]
)
def test_words_models_and_norms_are_no_codes(text):
    assert codes.find(text) == []


def test_found_spans_are_those_of_the_text():
    text = "code P0087 with SPN157 FMI 3"
    assert [text[start:end] for start, end, _ in codes.find(text)] == ["P0087", "SPN157", "FMI 3"]


def test_listed_codes_never_share_a_row():
    listed = [f"{family}{number:03d}" for family in ("P0", "P2", "U0", "C0", "B0") for number in range(1000)]
    listed += [f"FMI {number}" for number in range(32)] + [f"MID {number}" for number in range(256)]
    listed += [f"SPN {number}" for number in (*range(2000), *range(3000, 4000))]
    rows = [row_of(code) for code in listed]

    assert len(set(rows)) == len(rows) == 8288
    assert (min(rows), max(rows)) == (1, 8288)


@pytest.mark.parametrize("code", ["P0A80", "P1234", "SPN 2500", "SPN 524287", "CID 168", "E1234", "HYD-204", "EID 1"])
def test_other_codes_are_hashed_behind_the_listed_ones(code):
    assert 8289 <= row_of(code) <= 9999


def test_rows_are_the_same_in_every_process():
    assert [row_of(code) for code in ("P0087", "SPN 157", "FMI 3", "CID 168")] == [88, 5190, 5004, 9941]


@pytest.mark.parametrize(
    ("one", "other"), [("p0087", "P0087"), ("SPN157", "SPN 157"), ("CID 0168", "cid-168"), ("E-1234", "E1234")]
)
def test_spellings_of_one_code_have_one_row(one, other):
    assert row_of(one) == row_of(other)
    assert codes.canonical(one) == codes.canonical(other)


@pytest.mark.parametrize(
    ("code", "index"),
    [("P0087", 0), ("P0300", 3), ("P0A80", 10), ("B1000", 16), ("C0035", 32), ("U0100", 49), ("U3F00", 63)],
)
def test_the_subsystem_of_an_obd_code_is_its_letter_and_third_character(code, index):
    assert codes.subsystem(code) == index


def test_a_listed_spn_shares_the_subsystem_of_the_obd_code_for_the_same_part():
    assert codes.subsystem("SPN157 FMI 3") == codes.subsystem("P0087")


def test_every_other_code_has_a_subsystem_too():
    assert {codes.subsystem(code) for code in ("SPN 9999", "E1234", "nonsense")} <= set(range(64))


def test_every_subsystem_has_a_name_of_its_own():
    names = [codes.subsystem_name(index) for index in range(codes.NUM_SUBSYSTEMS)]
    assert len(set(names)) == 64
    assert names[3] == "powertrain P_3: ignition, misfire and engine speed"


@pytest.mark.parametrize("index", [-1, 64])
def test_a_subsystem_that_is_none_is_refused(index):
    with pytest.raises(ValueError, match="there are 64, 0 to 63"):
        codes.subsystem_name(index)


@pytest.mark.parametrize("function", [codes.canonical, codes.subsystem])
def test_a_blank_code_is_refused(function):
    with pytest.raises(ValueError, match=re.escape("an error code is blank")):
        function("  ")


def test_a_code_has_its_row_at_its_last_token():
    text = "x P0087, SPN 157."
    offsets = [(0, 1), (1, 4), (4, 7), (7, 8), (8, 12), (12, 16), (16, 17)]
    assert codes.align(text, offsets) == [0, 0, 88, 0, 0, 5190, 0]
