"""Names of tests and first lines of docstrings stay short enough to read in a list."""

import re

from tests.support import ROOT

FOLDERS = (".ci", "benchmarks", "docs", "lightning_unified", "tests")
SOURCES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
LONG_NAME = re.compile(r"^\s*(?:async )?def (test_\w{75,})", re.MULTILINE)  # `test_` and 75 more are 80
FINISHED = (
    "benchmarks",
    *(f"lightning_unified/{name}" for name in ("data", "files", "models", "nn", "options", "precision")),
)


def longer_than(most):
    return re.compile(rf'^ *r?"""((?:(?!""").){{{most + 1},}})', re.MULTILINE)


LONG_FIRST_LINE = longer_than(105)


def found(pattern, paths):
    """Return each file's matches, by its path."""
    matches = {path.relative_to(ROOT).as_posix(): pattern.findall(path.read_text(encoding="utf-8")) for path in paths}
    return {path: those for path, those in matches.items() if those}


def test_names_of_tests_have_fewer_than_80_characters():
    tests = [path for path in SOURCES if path.name.startswith("test_")]

    assert len(tests) > 200
    assert found(LONG_NAME, tests) == {}, "say what each claims in fewer words"


def test_first_lines_of_docstrings_have_at_most_105_characters():
    assert found(LONG_FIRST_LINE, SOURCES) == {}, "write one short sentence, and the details below an empty line"


def test_first_lines_have_at_most_90_characters_in_finished_packages():
    sources = [path for folder in FINISHED for path in (ROOT / folder).rglob("*.py")]

    assert len(sources) > 300
    assert found(longer_than(90), sources) == {}, "write one short sentence, and the details below an empty line"


def test_a_long_first_line_is_found_with_and_without_details():
    line = "x" * 106
    texts = [f'"""{line}"""\n', f'    """{line}\n\n    Details.\n', f'r"""{line}\n', f'"""{line[1:]}"""\n']

    assert [bool(LONG_FIRST_LINE.search(text)) for text in texts] == [True, True, True, False]
