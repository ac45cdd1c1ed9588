"""The campaigns' records show no loss, and their page states the records' figures."""

import json

from benchmarks.records import cell
from tests.support import ROOT

PAGE = (ROOT / "docs" / "lab" / "campaigns.md").read_text(encoding="utf-8")


def record(name):
    return json.loads((ROOT / "benchmarks" / "recovery" / f"{name}.json").read_text(encoding="utf-8"))


def table(first):
    """Return the page's table whose first column is headed `first`.

    Rows are found by name, cells by heading.
    """
    lines = PAGE[PAGE.index(f"| {first} | runs |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def test_the_page_states_the_recorded_figures_of_faults():
    totals = record("fault_campaign")["totals"]
    stated = table("fault")

    assert list(stated) == list(totals)
    for kind, cells in stated.items():
        assert cells == {name: cell(totals[kind][name]) for name in cells}, kind


def test_the_page_states_the_recorded_figures_of_pressure():
    seconds = record("pressure_campaign")["totals"]["seconds"]
    stated = table("seconds")

    assert list(stated) == list(seconds)
    for what, cells in stated.items():
        assert cells == {name: cell(seconds[what][name]) for name in cells}, what


def test_the_record_of_faults_has_enough_runs_and_no_loss():
    found = record("fault_campaign")

    assert len(found["runs"]) >= 500
    assert all(run["sound"] for run in found["runs"])
    assert {run["difference"] for run in found["runs"] if not run["said"]} == {0.0}
    assert sum(run["said"] for run in found["runs"]) <= 1
    assert any(run["model"] == "keeps" for run in found["runs"])
    assert sum(run["steps_lost"] + run["counted_twice"] + run["missed"] + run["hung"] for run in found["runs"]) == 0


def test_the_record_of_pressure_has_enough_runs_that_all_learn_the_same():
    runs = record("pressure_campaign")["runs"]

    assert len(runs) >= 20
    assert all(run["sound"] for run in runs)
    assert {run["difference"] for run in runs} == {0.0}
    assert {run["steps_lost"] for run in runs} == {0}


def test_the_page_on_weights_states_the_recorded_figures():
    found = json.loads((ROOT / "benchmarks" / "weight_files" / "memory.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "explanation" / "weight_files.md").read_text(encoding="utf-8")
    ours = [run for run in found["runs"] if run["way"] in {"pretrained", "inference", "resume", "save"}]

    assert {run["limited"] for run in ours} == {"yes"}
    assert max(run["peak"] for run in ours) < 1.1
    for run in found["runs"]:
        assert f"| {run['peak']:.2f} | {run['limited']} |" in page, run["way"]
