"""The trained compressor's record meets its bar, and its page states the record's figures."""

import json
import re

import pytest

from tests.support import ROOT

RECORD = json.loads((ROOT / "benchmarks" / "models" / "compressor" / "quality.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "models" / "compressor.md").read_text(encoding="utf-8")
READERS = {"own_reader": "judged by its own reader", "practised_reader": "by one that practised on all"}


@pytest.mark.parametrize("reader", READERS)
def test_the_policy_is_ahead_of_what_needs_no_model_with_intervals_apart(reader):
    rows = {(row["method"], row["keep"]): row["dropped_cross_entropy"] for row in RECORD[reader]["rows"]}

    for baseline in ("random", "frequency", "length", "position"):
        for keep in (0.3, 0.5, 0.7):
            assert rows["policy", keep]["high"] < rows[baseline, keep]["low"], (baseline, keep)


@pytest.mark.parametrize("reader", READERS)
def test_the_page_states_the_recorded_figures(reader):
    lines = PAGE[PAGE.index(f"| {READERS[reader]} |") :].split("\n\n")[0].splitlines()[2:]
    stated = {
        re.sub(r"\W+", "_", name.strip(" *").lower()): cells for name, *cells in (x.split("|")[1:-1] for x in lines)
    }
    rows = {(row["method"], row["keep"]): row["dropped_cross_entropy"] for row in RECORD[reader]["rows"]}

    assert {name.replace("n_gram", "ngram") for name in stated} == {method for method, _ in rows}
    for name, cells in stated.items():
        for keep, cell in zip((0.3, 0.5, 0.7), cells, strict=True):
            found = rows[name.replace("n_gram", "ngram"), keep]
            assert cell.strip() == f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
