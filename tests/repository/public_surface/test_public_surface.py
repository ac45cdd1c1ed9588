"""The public surface is the recorded one.

`tests/cli/run/test_run.py` checks the keys of summary.json where it trains anyway.
"""

import pytest

from tests.repository.public_surface import subjects
from tests.repository.public_surface.records import key_lines
from tests.repository.public_surface.subjects import SUBJECTS, check


@pytest.mark.parametrize("subject", [each for each in SUBJECTS if each.name != "summary"], ids=lambda each: each.name)
def test_the_public_surface_is_the_recorded_one(subject):
    check(subject.name, subject.describe())


def test_a_change_is_shown_with_the_way_to_record_it(monkeypatch, tmp_path):
    monkeypatch.setattr(subjects, "HERE", tmp_path)
    (tmp_path / "doctor.txt").write_text("reading\npool\n")

    check("doctor", ["reading", "pool"])
    with pytest.raises(AssertionError) as caught:
        check("doctor", ["reading", "tier"])

    assert "-pool\n+tier\n" in str(caught.value)
    assert "python -m tests.repository.public_surface" in str(caught.value)
    assert "CHANGELOG.md" in str(caught.value)


def test_keys_of_lists_are_taken_together():
    assert key_lines({"a": {"b": 1}, "c": [{"d": 1}, {"e": 2}], "f": []}) == ["a.b", "c[].d", "c[].e", "f"]
