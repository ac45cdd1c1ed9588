"""A fixed sample of the fault campaign: no run loses anything."""

import json
import sys

import pytest

from benchmarks.recovery.campaign import comparing
from tests.support import ROOT
from tests.support.lanes import slow
from tests.support.programs import run_program

CAMPAIGN = ROOT / "benchmarks" / "recovery" / "fault_campaign.py"
FEW, MANY = 2, 36  # runs: of two kinds, and two of each kind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its processes are forked and limited as Linux does")


@pytest.fixture(scope="module")
def record(tmp_path_factory, request):
    output = tmp_path_factory.mktemp("campaign") / "record.json"
    arguments = ["--runs", str(request.param), "--seed", "7", "--output", str(output)]
    done = run_program(CAMPAIGN, *arguments, timeout=600)
    assert output.exists(), done.stderr
    return json.loads(output.read_text()), done


@pytest.mark.parametrize(("record", "runs"), [(FEW, FEW), slow(MANY, MANY)], indirect=["record"])
def test_no_run_of_the_sample_loses_anything(record, runs):
    found, done = record
    totals = found["totals"]["all"]

    assert done.returncode == 0, done.stdout
    assert totals["runs"] == runs
    nothing = ("lost", "steps lost", "counted twice", "missed", "state or logs differ", "hangs", "unsound")
    assert {name: totals[name] for name in nothing} == dict.fromkeys(nothing, 0)
    assert totals["largest difference"] == 0
    assert (totals["largest rounding"] or 0.0) < 1e-9  # two runs may have none


@pytest.mark.slow
@pytest.mark.parametrize("record", [MANY], indirect=True)
def test_the_sample_has_some_of_each_kind_and_most_of_them_strike(record):
    found, _ = record
    totals = found["totals"]

    assert len(totals) == 19
    assert totals["all"]["never struck"] < totals["all"]["runs"] / 3
    assert totals["all"]["recoveries"] > 0
    assert totals["all"]["resumed"] > 0


def test_a_row_that_counts_twice_and_one_that_is_missed_are_seen():
    expected = {0: {"counts": None}, 1: {"counts": [0.25, 0.25, 0.25, 0.25]}}
    found = {0: {"counts": None}, 1: {"counts": [0.5, 0.25, 0.0, 0.25]}}

    assert comparing.counts(found, expected) == (1, 1)
    assert comparing.counts(expected, expected) == (0, 0)


def test_a_step_that_was_not_made_misses_all_its_rows():
    assert comparing.counts({}, {0: {"counts": [0.5, 0.5]}}) == (0, 2)
