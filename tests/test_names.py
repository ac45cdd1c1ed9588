"""Names of tests stay readable in a report: under 80 characters."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
LONG = re.compile(r"^\s*(?:async )?def (test_\w{75,})", re.MULTILINE)  # `test_` and 75 more are 80


def test_names_of_tests_have_fewer_than_80_characters():
    long = {
        path.relative_to(TESTS).as_posix(): found
        for path in TESTS.rglob("test_*.py")
        if (found := LONG.findall(path.read_text(encoding="utf-8")))
    }

    assert long == {}, "say what each claims in fewer words"
