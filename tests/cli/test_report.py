"""The command `report`: run directories in any state, and the page made from them."""

import json
import re
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_unified.cli.main import main
from lightning_unified.cli.report.command import _beside
from lightning_unified.cli.report.command import main as report
from lightning_unified.cli.report.html.page import page
from lightning_unified.cli.report.html.scale import amount, labels, ticks
from lightning_unified.cli.report.run_directory.find import find_runs, names_of
from lightning_unified.cli.report.run_directory.read import read_run
from lightning_unified.cli.run.metrics import read_curves
from lightning_unified.errors import ConfigurationError

GIB, MIB = 2**30, 2**20
VOID = {"meta", "br", "link", "input"}
SUMMARY = {
    "model": "gearhead",
    "device": "cuda:0",
    "pool": "dedicated",
    "budget_bytes": 4 * GIB,
    "effective_batch_size": 64,
    "micro_batch_size": 8,
    "steps": 40,
    "peak_bytes": {"predicted": None, "measured": 2 * GIB, "source": "max_memory_allocated"},
    "recoveries": 1,
    "validation": {"loss": 4.75},
    "versions": {"torch": "2.13.0", "numpy": None},
}
PLAN = {
    "micro_batch_size": 8,
    "precision": "bf16-mixed",
    "budget_bytes": 4 * GIB,
    "reasons": {"micro_batch_size": "the largest that fits", "precision": "native"},
    "prediction": {
        "peak_bytes": int(1.9 * GIB),
        "reserved_bytes": int(2.2 * GIB),
        "categories": {"weights": GIB, "optimizer state": int(0.9 * GIB), "buffers": 0},
        "confidence": "high",
        "instant": "backward of blocks.3",
        "instants": [["forward of blocks.0", GIB], ["backward of blocks.3", int(1.9 * GIB)]],
        "notes": ["attention without a flash kernel"],
    },
    "alternatives": [
        {"micro_batch_size": 8, "precision": "bf16-mixed", "peak_bytes": int(1.9 * GIB), "seconds": 0.5, "fits": True},
        {"micro_batch_size": 64, "precision": "bf16-mixed", "peak_bytes": 9 * GIB, "seconds": 0.4, "fits": False},
    ],
}
METRICS = """\
step,epoch,memory/allocated,memory/micro_batch_size,memory/peak,speed/samples_per_second,train/loss,val/loss
9,0,1000000000,16,1500000000,20.5,5.5,
19,0,1100000000,8,1600000000,21.5,5.0,
19,0,,,,,,4.9
39,0,1100000000,8,1600000000,21.5,4.8,4.75
"""


def line(kind, step, text="", **more):
    return json.dumps({"time": f"2026-01-01T00:00:{step:02d}+00:00", "step": step, "kind": kind, "text": text, **more})


JOURNAL = [
    line(
        "began",
        0,
        "GearHead begins",
        recoveries=0,
        budget_bytes=4 * GIB,
        machine={"name": "H200", "low_bytes": 3 * GIB},
    ),
    line("event", 11, "out of memory in forward with 16 rows at once; repeated with 8 at once", recoveries=1),
    line("ended", 40, "ended after step 40", recoveries=1, budget_bytes=4 * GIB),
]


def make(folder, *, config="trainer: {max_steps: 40}\nmemory: {budget: 4GiB}\n", **files):
    """Make a run directory; a file given as None is left out."""
    content = {
        "summary.json": json.dumps(SUMMARY),
        "plan.json": json.dumps(PLAN),
        "metrics.csv": METRICS,
        "events.jsonl": "\n".join(JOURNAL) + "\n",
        "config.yaml": config,
    } | {name.replace("__", "."): text for name, text in files.items()}
    folder.mkdir(parents=True)
    for name, text in content.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def run_of(folder, **files):
    return read_run(make(folder, **files), name=folder.name)


class Tree(HTMLParser):
    """Reads a page and fails where a tag is not closed in its order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.attributes = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def read_page(*runs):
    text = page(runs)
    tree = Tree(text)
    assert tree.open == []
    return text, tree


def test_the_page_of_a_run_says_what_came_of_it(tmp_path):
    _, tree = read_page(run_of(tmp_path / "run"))

    for words in (
        "finished, 40 steps",
        "2.00 GiB, 50% of the budget",
        "1.90 GiB, 5.0% below the measured",
        "8 of 64 rows",
        "low mark 3.00 GiB",
        "predicted peak 1.90 GiB",
        "the largest that fits",
        "confidence: high; the peak is in: backward of blocks.3; attention without a flash kernel",
        "out of memory in forward with 16 rows at once; repeated with 8 at once",
        "H200",
        "not installed",
    ):
        assert words in tree.text


def test_the_page_asks_nothing_of_a_network(tmp_path):
    text, tree = read_page(run_of(tmp_path / "one"), run_of(tmp_path / "two"))

    assert not [each for each in tree.attributes if each[0] in ("src", "href", "srcset", "action", "data")]
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "default-src 'none'" in text


def test_every_chart_holds_finite_points_and_its_values(tmp_path):
    text, _ = read_page(run_of(tmp_path / "run"))
    charts = [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    loss = next(each for each in charts if [line["label"] for line in each["series"]] == ["train/loss", "val/loss"])

    assert loss["series"][0] == {"label": "train/loss", "color": "train", "x": [9, 19, 39], "y": [5.5, 5.0, 4.8]}
    assert loss["series"][1]["x"] == [19, 39]
    assert not re.search(r'd="[^"]*(nan|inf)', text)


def test_what_a_run_calls_itself_stays_text(tmp_path):
    name = "<script>alert(1)</script>{{style}}"
    text, tree = read_page(run_of(tmp_path / "run", summary__json=json.dumps(SUMMARY | {"model": name})))

    assert "<script>alert" not in text
    assert name in tree.text


def test_a_run_that_left_nothing_but_metrics_is_told_of_with_them(tmp_path):
    run = run_of(tmp_path / "run", summary__json=None, plan__json=None, events__jsonl=None, config__yaml=None)
    _, tree = read_page(run)

    assert run.status == "not finished: still running, or killed; the last logged step is 39"
    assert "1.49 GiB" in tree.text  # the greatest peak that was logged
    assert "recoveries unknown" in tree.text
    assert "peak, predicted unknown" in tree.text
    assert "unknown: there is no readable plan.json" in tree.text


def test_a_run_that_logged_nothing_says_so_in_each_chart(tmp_path):
    _, tree = read_page(run_of(tmp_path / "run", metrics__csv="step,epoch\n"))

    assert tree.text.count("unknown: no such metric was logged") == 5


def test_a_run_that_failed_says_where_and_of_what(tmp_path):
    failed = [
        *JOURNAL[:2],
        line("failed", 12, "OutOfMemoryError: one row does not fit", recoveries=1, plan={"precision": "x"}),
    ]
    run = run_of(tmp_path / "run", summary__json=None, plan__json=None, events__jsonl="\n".join(failed))

    assert (run.status, run.well) == ("failed at step 12: OutOfMemoryError: one row does not fit", False)
    assert run.plan == {"precision": "x"}


def test_a_run_that_was_stopped_early_says_of_how_many_steps(tmp_path):
    assert (
        run_of(tmp_path / "run", summary__json=json.dumps(SUMMARY | {"steps": 7})).status
        == "stopped after 7 of 40 steps"
    )


def test_a_summary_older_than_the_newest_part_of_a_run_is_not_its_end(tmp_path):
    resumed = [*JOURNAL, line("began", 41, "GearHead begins", recoveries=0)]

    assert run_of(tmp_path / "run", events__jsonl="\n".join(resumed)).status.startswith("not finished")


def test_recoveries_of_a_resumed_run_are_added_up(tmp_path):
    ran_out = "out of memory in backward with 8 rows at once; repeated with 4 at once"
    parts = [
        *JOURNAL,
        line("began", 41, recoveries=0),
        line("event", 45, ran_out, recoveries=1),
        line("ended", 50, recoveries=1),
    ]
    run = run_of(tmp_path / "run", events__jsonl="\n".join(parts))

    assert [moment.recoveries for moment in run.moments] == [0, 1, 1, 1, 2, 2]
    assert [moment.step for moment in run.moments if moment.kind == "recovery"] == [11, 45]


def test_rows_that_a_resumed_run_took_anew_replace_the_old_ones(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step,a\n1,10\n2,20\n3,30\n2,21\n4,41\n")

    assert read_curves([file])["a"].steps == (1, 2, 4)
    assert read_curves([file])["a"].values == (10, 21, 41)


def test_a_value_that_is_not_finite_breaks_the_curve_and_is_not_left_out(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step,a\n1,10\n2,nan\n3,30\nsomething,else\n4")
    curve = read_curves([file])["a"]

    assert (curve.steps, curve.values, curve.last) == ((1, 2, 3), (10, None, 30), 30)
    text, _ = read_page(run_of(tmp_path / "run", metrics__csv=file.read_text().replace("a\n", "train/loss\n", 1)))
    assert re.search(r'class="line solid" d="M[\d. ]+M[\d. ]+"', text)


def test_metrics_of_lightnings_own_logger_are_found(tmp_path):
    folder = make(tmp_path / "run", metrics__csv=None)
    for version, value in ((0, 1.0), (10, 3.0), (2, 2.0)):
        (folder / f"lightning_logs/version_{version}").mkdir(parents=True)
        (folder / f"lightning_logs/version_{version}/metrics.csv").write_text(f"step,loss\n{version},{value}\n")

    assert read_run(folder, name="run").curves["loss"].values == (1.0, 2.0, 3.0)


def test_a_file_that_is_broken_is_named_and_the_rest_is_shown(tmp_path):
    run = run_of(tmp_path / "run", plan__json="{ bro", events__jsonl=JOURNAL[0] + '\n{"time": "2026-', config="a: [")
    _, tree = read_page(run)

    assert [problem.split(" cannot")[0] for problem in run.problems] == ["plan.json", "config.yaml"]
    assert "Files that cannot be read" in tree.text and "plan.json cannot be read: it is no JSON" in tree.text
    assert len(run.moments) == 1


def test_what_the_guard_did_stands_between_what_the_run_did(tmp_path):
    felt = {
        "time": "2026-01-01T00:00:05+00:00",
        "step": 5,
        "level": "warn",
        "reasons": ["swap"],
        "action": "caches cleared",
    }
    run = run_of(tmp_path / "run", pressure__jsonl=json.dumps(felt) + "\n")

    assert [moment.kind for moment in run.moments] == ["began", "pressure", "recovery", "ended"]
    assert run.moments[1].text == "pressure warn: caches cleared (swap)"


def test_several_runs_stand_side_by_side_with_what_differs(tmp_path):
    one = run_of(tmp_path / "one", config="run_dir: /a/one\nmemory: {budget: 4GiB}\nlog: /a/one/x\n")
    two = run_of(
        tmp_path / "two",
        config="run_dir: /a/two\nmemory: {budget: 8GiB}\nlog: /a/two/x\nseed: 3\n",
        summary__json=json.dumps(SUMMARY | {"budget_bytes": 8 * GIB, "validation": {"loss": 4.5}}),
    )
    text, tree = read_page(one, two)
    differing = re.findall(r"<th scope=row><code>([^<]*)</code></th><td>([^<]*)</td><td>([^<]*)</td>", text)

    assert differing == [("memory.budget", "4GiB", "8GiB"), ("seed", "not set", "3")]
    assert "<b>4.750</b></td><td><b>4.500</b>" in text
    assert "train/loss" in tree.text and 'stroke="var(--run-1)"' in text


def test_copies_of_groups_within_the_trainer_are_not_told_twice(tmp_path):
    config = "memory: {budget: 4GiB}\ntrainer: {strategy: {budget: 4GiB}, max_steps: 40}\n"
    text, _ = read_page(run_of(tmp_path / "run", config=config))

    assert "all 2 keys" in text


def test_of_the_plans_that_were_weighed_the_chosen_one_is_marked(tmp_path):
    weighed = [
        {"micro_batch_size": 16, "recompute": recompute, "precision": "bf16-mixed", "peak_bytes": peak, "fits": fits}
        for recompute, peak, fits in (("all", GIB, True), ("2 blocks", 2 * GIB, True), (None, 5 * GIB, False))
    ]
    prediction = PLAN["prediction"] | {"rows": 16, "peak_bytes": 2 * GIB}
    plan = PLAN | {"alternatives": weighed, "prediction": prediction, "micro_batch_size": 8}
    text, _ = read_page(run_of(tmp_path / "run", plan__json=json.dumps(plan)))

    assert re.findall(r"<td><b>(2 blocks|all)</b></td>", text) == ["2 blocks"]


def test_a_peak_of_the_whole_process_is_not_held_against_the_prediction(tmp_path):
    peak = {"predicted": None, "measured": GIB, "source": "VmHWM"}
    _, tree = read_page(run_of(tmp_path / "run", summary__json=json.dumps(SUMMARY | {"peak_bytes": peak})))

    assert "1.90 GiB; the measured counts the whole process (VmHWM)" in tree.text
    assert "of the measured" not in tree.text


def test_figures_of_a_simulated_machine_are_found(tmp_path):
    simulated = METRICS.replace("memory/", "memory_simulated_m2-16gb/").replace("/peak", "/peak_sampled")
    text, _ = read_page(run_of(tmp_path / "run", metrics__csv=simulated))

    assert "no such metric was logged" not in text.partition("<h2>Speed</h2>")[0]


def test_a_long_run_makes_a_page_that_is_small_and_keeps_its_extremes(tmp_path):
    rows = "".join(f"{step},{1000.0 if step == 54321 else step % 7}\n" for step in range(100_000))
    text, _ = read_page(run_of(tmp_path / "run", metrics__csv=f"step,train/loss\n{rows}"))

    assert len(text) < 200_000
    assert "54321" in text


def test_a_page_of_as_many_runs_as_it_tells_apart_stays_below_two_megabytes(tmp_path):
    columns = ["step", "memory/allocated", "memory/reserved", "memory/peak", "speed/samples_per_second", "train/loss"]
    rows = "\n".join(",".join(map(str, [step, *[step % 91 * 1e7] * 5])) for step in range(700))
    runs = [run_of(tmp_path / str(index), metrics__csv=f"{','.join(columns)}\n{rows}\n") for index in range(24)]

    assert len(read_page(*runs)[0]) < 2_000_000


def test_a_sweeps_folder_stands_for_its_runs(tmp_path):
    for size in (1, 4):
        make(tmp_path / f"sweep/memory.micro_batch_size={size}")
    runs = find_runs([str(tmp_path / "sweep"), str(tmp_path / "sweep/memory.micro_batch_size=1")])

    assert names_of(runs) == ["memory.micro_batch_size=1", "memory.micro_batch_size=4"]


def sweep_page(folder, losses):
    runs = []
    for (rate, epochs), loss in losses.items():
        directory = make(
            folder / f"rate={rate},epochs={epochs}",
            summary__json=json.dumps(SUMMARY | {"validation": {"loss": loss, "accuracy": 0.5}}),
        )
        (directory / ".hydra").mkdir()
        given = f"[seed=1, model.learning_rate={rate}, trainer.max_epochs={epochs}, '+run_dir={directory}']"
        (directory / ".hydra/overrides.yaml").write_text(given)
        runs.append(read_run(directory, name=directory.name))
    return read_page(*runs)[0]


def test_the_runs_of_a_sweep_stand_in_order_of_their_loss_with_what_was_varied(tmp_path):
    text = sweep_page(tmp_path, {("1e-5", 2): 0.75, ("1e-3", 2): 0.25, ("1e-4", 3): None})
    section = text[text.index("Varied settings") : text.index("<h2>Memory</h2>")]
    cells = re.findall(r"rate=[^<]*</b></th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", section)

    assert "seed" not in section and "run_dir" not in section
    assert cells == [
        ("<b>1e-3</b>", "<b>2</b>", "<b>0.2500</b>", "<b>0.5000</b>"),
        ("1e-5", "2", "0.7500", "0.5000"),
        ("1e-4", "3", "4.750", "0.5000"),
    ]


def test_a_value_that_a_run_was_not_given_is_that_of_its_configuration(tmp_path):
    given = {"one": ("seed: 7\n", []), "two": ("seed: 9\n", ["seed=9"]), "three": ("seed: 7\n", ["memory=small"])}
    runs = [replace(run_of(tmp_path / name, config=text), overrides=own) for name, (text, own) in given.items()]
    section = read_page(*runs)[0].split("Varied settings")[1].split("<h2>Memory</h2>")[0]

    assert ">7<" in section and ">9<" in section
    assert "default" in section and "–" not in section


def test_the_loss_is_drawn_over_each_number_that_was_varied(tmp_path):
    text = sweep_page(tmp_path, {("1e-5", 1): 0.75, ("1e-4", 1): 0.5, ("1e-3", 1): 0.25})
    chart = re.search(r'<figure class="plot versus">.*?</figure>', text).group()
    dots = [tuple(map(float, each)) for each in re.findall(r'd="M([\d.]+) ([\d.]+)h0"', chart)]

    assert text.count('class="plot versus"') == 1
    assert "model.learning_rate" in chart
    assert dots == [(80.0, 100.0), (500.0, 500.0), (920.0, 900.0)]


def test_runs_that_were_given_the_same_are_no_sweep(tmp_path):
    assert "Varied settings" not in read_page(run_of(tmp_path / "one"), run_of(tmp_path / "two"))[0]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [make(tmp_path / "a/run"), make(tmp_path / "b/run")]

    assert names_of(runs) == ["a/run", "b/run"]


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
    root = Path(__file__).resolve().parents[2]
    shipped = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = root / "lightning_unified/cli/report/html"

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
