"""README says what its records and the program say, and a newcomer reads it at one go."""

import json
import re
import warnings

import pytest

from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def record(path):
    return json.loads((ROOT / "benchmarks" / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorded():
    """The record behind the picture, and its runs by method."""
    found = record("recovery/memory_over_time.json")
    return found, {run["method"]: run for run in found["runs"]}


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_the_picture_shows_a_run_that_ends_and_two_that_finish(recorded):
    found, runs = recorded
    limit, whole = found["limit_bytes"] / 2**30, found["peak_without_limit_bytes"] / 2**30

    assert f"capped at {limit:.2f} GiB; a long batch needs {whole:.2f} GiB" in README
    assert "ends at step 9" in README
    assert len(runs["plain"]["steps"]) == 9
    assert runs["plain"]["error"].startswith("OutOfMemoryError")
    for method in ("recovery alone", "planned"):
        assert (len(runs[method]["steps"]), runs[method]["error"]) == (20, None)
        assert runs[method]["peak_mib"] * 2**20 < found["limit_bytes"]
    assert sum(step["recoveries"] for step in runs["recovery alone"]["steps"]) > 0
    assert sum(step["recoveries"] for step in runs["planned"]["steps"]) == 0


def test_the_losses_of_the_picture_are_those_of_a_run_without_a_limit(recorded):
    found, runs = recorded
    stated = float(re.search(r"up to ([\d.]+) %", README)[1]) / 100
    whole = found["losses_without_limit"]
    largest = max(
        abs(step["loss"] - loss) / loss
        for method in ("recovery alone", "planned")
        for step, loss in zip(runs[method]["steps"], whole, strict=True)
    )

    assert 0 < largest <= stated


def test_the_pictures_are_there_and_small():
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', README)

    assert sorted(pictures) == ["docs/images/recovery-dark.png", "docs/images/recovery-light.png"]
    assert all((ROOT / picture).stat().st_size < 100_000 for picture in pictures)


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_record(recorded, tmp_path):
    draw = pytest.importorskip("benchmarks.recovery.memory_picture").draw
    drawn = draw(recorded[0], tmp_path)

    assert [path.name for path in drawn] == ["recovery-light.png", "recovery-dark.png"]
    assert all(path.stat().st_size > 10_000 for path in drawn)


def test_the_six_figures_are_those_of_their_records():
    section = README[README.index("## Six figures") : README.index("## What is not verified")]
    campaign = record("recovery/fault_campaign.json")["runs"]
    accuracy = record("planner/records/accuracy_cuda.json")["summary"]["figures"]["all"]["planner"]
    adherence = record("planner/records/adherence_cuda.json")["summary"]
    overhead = record("overhead/overhead_cuda.json")["step of 20 ms and more, unified"]

    runs = record("options/blocks/compiled_blocks.json")["runs"]
    blocks = {run["cell"]: run for run in runs if run["device"] == "NVIDIA H200"}
    cells = {name: blocks[f"gpt/{name}"] for name in ("bare", "blocks half", "blocks quarter")}
    speed = {name: f"{cell['ktok_s']:.0f}" for name, cell in cells.items()}
    peak = {name: f"{cell['peak_bytes'] / 2**30:.1f} GiB" for name, cell in cells.items()}
    half, quarter = (f"{speed[name]} in {{}} ({peak[name]})" for name in ("blocks half", "blocks quarter"))

    assert section.count("\n| ") == 7  # the head and six rows
    assert half.format("half the memory of a bare compiled loop") in section
    assert f"{quarter.format('a quarter')}; the loop {speed['bare']} ({peak['bare']})" in section
    assert (
        f"percentile of the error {accuracy['p95_absolute']:.2%}, worst {abs(accuracy['worst']):.2%}".replace("%", " %")
        in section
    )
    assert f"{accuracy['cells']} cells" in section
    assert f"{adherence['trained']} of {adherence['rows']} trained inside" in section
    assert (adherence["exceeded"], adherence["without_recovery"]) == (0, 1.0)
    assert len(campaign) >= 500
    assert sum(run["steps_lost"] + run["counted_twice"] + run["missed"] + run["hung"] for run in campaign) == 0
    ratios = [f"{overhead[name]:.4f}" for name in ("ratio", "ratio_low", "ratio_high")]
    assert "{} of plain Lightning's (95 % interval {} to {})".format(*ratios) in section


def test_the_times_to_a_first_step_are_those_of_the_record():
    found = record("planner/records/finders_cuda.json")["summary"]
    times = {
        who: [
            run["seconds"] for cell, run in found.items() if cell.partition(": ")[2].startswith(who) and run["seconds"]
        ]
        for who in ("planned", "BatchSizeFinder", "find_executable")
    }
    ranges = {who: f"{min(all_of_them):.1f} to {max(all_of_them):.1f} s" for who, all_of_them in times.items()}

    assert (
        f"| {ranges['planned']}; `BatchSizeFinder` {ranges['BatchSizeFinder']}, Accelerate {ranges['find_executable']} |"
        in README
    )


def test_the_example_saves_memory_and_changes_no_weight(capsys):
    code = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    printed = [line for line in capsys.readouterr().out.splitlines() if "weights sum to" in line]
    peaks = [int(re.search(r": (\d+) MiB", line)[1]) for line in printed]
    weights = [float(line.rpartition(" ")[2]) for line in printed]

    assert peaks[1] <= 48 < peaks[0]
    assert weights[0] == pytest.approx(weights[1], rel=1e-5)
    for line in printed:  # as the page says, but for the last digits on another processor
        assert re.search(rf"`{line.partition(':')[0]}: (\d+) MiB, weights sum to [\d.]+`", README)
