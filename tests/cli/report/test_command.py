"""The command `report` finds runs, names wrong paths, and writes its page where it belongs."""

import json
import tomllib
from pathlib import Path

import pytest

from lightning_unified.cli.main import main
from lightning_unified.cli.report.command import _beside
from lightning_unified.cli.report.command import main as report
from lightning_unified.cli.report.html.scale import amount, labels, ticks
from lightning_unified.cli.report.run_directory.find import find_runs
from lightning_unified.errors import ConfigurationError
from tests.cli.report.made_runs import (
    GIB,
    make,
)
from tests.support import ROOT


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "runs/gearhed/2026",
            r"runs/gearhed/2026: there is no such directory; the nearest run is runs/gearhead/2026\.",
        ),
        (
            "empty",
            r"empty: neither a run directory \(it has none of summary.json, .*\) nor a folder of some; the nearest run is",
        ),
        ("runs/gearhead/2026/plan.json", r"that is a file of a run; give its directory, runs/gearhead/2026\."),
    ],
)
def test_a_path_that_is_no_run_is_refused_with_the_nearest(tmp_path, monkeypatch, given, said):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs/gearhead/2026")
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigurationError, match=said):
        find_runs([given])


def test_without_a_run_the_newest_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs/gearhead/2026")

    assert report([]) == 2
    assert "report needs a run directory; the nearest run is runs/gearhead/2026." in capsys.readouterr().err


def test_more_runs_than_a_page_tells_apart_are_refused(tmp_path):
    for index in range(25):
        (tmp_path / f"runs/{index}").mkdir(parents=True)
        (tmp_path / f"runs/{index}/metrics.csv").write_text("step\n")

    with pytest.raises(ConfigurationError, match="these are 25 runs, and a page shows at most 24; name fewer, such as"):
        find_runs([str(tmp_path / "runs")])


def test_the_page_of_one_run_goes_into_its_directory(tmp_path, capsys):
    folder = make(tmp_path / "run")

    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert str(folder / "report.html") in capsys.readouterr().out


def test_the_page_of_several_goes_beside_them_and_not_where_it_is_called(tmp_path, monkeypatch):
    folders = [str(make(tmp_path / "runs" / name)) for name in ("net/one", "sweep/two")]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    assert report(folders) == 0
    assert "2 runs" in (tmp_path / "runs/report.html").read_text()
    assert list((tmp_path / "here").iterdir()) == []


def test_runs_without_a_folder_in_common_have_their_page_beside_the_first():
    runs = [Path("/scratch/one/run"), Path("/home/two/run")]

    assert _beside(runs, given=["a", "b"]) == Path("/scratch/one/report.html")


def test_open_shows_the_page(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("webbrowser.open", shown.append)

    assert report([str(make(tmp_path / "run")), "--open"]) == 0
    assert shown == [(tmp_path / "run/report.html").as_uri()]


def test_json_is_what_is_known_and_makes_no_page(tmp_path, capsys):
    folder = make(tmp_path / "run")
    assert report([str(folder), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]

    assert (run["name"], run["summary"]["steps"], run["status"]) == ("run", 40, "finished, 40 steps")
    assert run["curves"]["val/loss"] == {"steps": [19, 39], "values": [4.9, 4.75]}
    assert run["moments"][1]["kind"] == "recovery"
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("absent/page.html", "cannot be written: No such file or directory"),
        ("page.json", "name a file that ends in .html"),
    ],
)
def test_an_output_that_cannot_be_makes_no_sense(tmp_path, capsys, output, said):
    assert report([str(make(tmp_path / "run")), "--output", str(tmp_path / output)]) == 2
    assert said in capsys.readouterr().err


def test_what_the_page_is_made_of_is_shipped():

    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "lightning_unified/cli/report/html"

    assert set(shipped["lightning_unified.cli.report.html"]) == {
        path.name for path in folder.glob("page.*") if path.suffix != ".py"
    }


@pytest.mark.parametrize(
    ("low", "high", "unit", "expected"),
    [
        (0, 4.3 * GIB, "bytes", ["0 GiB", "1 GiB", "2 GiB", "3 GiB", "4 GiB"]),
        (0, 0.9, "seconds", ["0 ms", "200 ms", "400 ms", "600 ms", "800 ms"]),
        (5.29, 5.82, "", ["5.3", "5.4", "5.5", "5.6", "5.7", "5.8"]),
        (6.2294, 6.2313, "", ["6.2295", "6.2300", "6.2305", "6.2310"]),
    ],
)
def test_ticks_are_round_in_the_unit_they_are_printed_in(low, high, unit, expected):
    assert labels(ticks(low, high, unit=unit), unit) == expected


def test_an_unknown_amount_is_never_a_number():
    assert amount(None, "bytes") == "unknown"
    assert amount(None) == "unknown"
