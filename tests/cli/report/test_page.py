"""The page about one run shows its results, and holds no part of another origin."""

import json
import re

from lightning_unified.cli.report.run_directory.read import read_run
from lightning_unified.cli.run.metrics import read_curves
from tests.cli.report.made_runs import (
    JOURNAL,
    SUMMARY,
    line,
    make,
    read_page,
    run_of,
)


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


def test_the_page_shows_the_samples_of_a_run_as_text(tmp_path):
    text, tree = read_page(run_of(tmp_path / "run", samples__txt="asked: 1 < 2?\nanswered: <b>yes</b>\x1b[0m\n"))

    assert "asked: 1 < 2? answered: <b>yes</b>" in tree.text
    assert "answered: &lt;b&gt;yes" in text
    assert "\x1b" not in text
    assert "<h2>Samples</h2>" in text
    assert "<h2>Samples</h2>" not in read_page(run_of(tmp_path / "other"))[0]


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


def test_a_run_that_left_only_metrics_is_shown_with_them(tmp_path):
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
