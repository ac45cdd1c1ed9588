"""The page about several runs, or a sweep, shows what differs between them."""

import json
import re
from dataclasses import replace

from lightning_unified.cli.report.run_directory.find import find_runs, names_of
from lightning_unified.cli.report.run_directory.read import read_run
from tests.cli.report.made_runs import (
    GIB,
    METRICS,
    PLAN,
    SUMMARY,
    make,
    read_page,
    run_of,
)


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


def test_copies_of_groups_within_the_trainer_are_not_shown_twice(tmp_path):
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


def sweep_page(folder, losses, *, scores=None, **files):
    runs = []
    for ((rate, epochs), loss), score in zip(losses.items(), scores or [0.5] * len(losses), strict=True):
        directory = make(
            folder / f"rate={rate},epochs={epochs}",
            summary__json=json.dumps(SUMMARY | {"validation": {"loss": loss, "accuracy": score}}),
            **files,
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


def test_a_sweep_judged_by_a_score_stands_in_order_of_the_score(tmp_path):
    config = "callbacks:\n  checkpoint:\n    monitor: val/accuracy\n    mode: max\n"
    text = sweep_page(tmp_path, {("1e-5", 1): 0.25, ("1e-3", 1): 0.75}, scores=(0.5, 0.9), config=config)
    section = text[text.index("Varied settings") : text.index("<h2>Memory</h2>")]

    assert re.findall(r"rate=[^<]*</b></th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", section) == [
        ("<b>1e-3</b>", "<b>0.9000</b>", "<b>0.7500</b>"),
        ("1e-5", "0.5000", "0.2500"),
    ]
    assert "accuracy over <code>model.learning_rate" in section


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
