"""The planner's benchmarks: cells, failed cells, judged rows, and training modules."""

import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.planner import accuracy, adherence
from benchmarks.planner.harness import cells, pool, recording, rival, tables, truth
from benchmarks.planner.zoo import modules

PLAIN = (
    "mlp", "cnn", "resnet", "lstm", "gru", "gearhead-small", "gearhead-34m", "gearhead-118m", "bert-like", "encoder-decoder",
    "moe, fixed capacity", "moe, shapes by values", "lora, frozen lm", "u-net", "graph scatter", "tied 150k vocabulary",
)  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its processes are forked and limited as Linux does")


def gave(pid):
    return {"value": 7, "process": os.getpid() != pid}


def fails():
    raise ValueError("no such thing")


def dies():
    os.kill(os.getpid(), 9)


def hangs():
    time.sleep(60)


def run(*works, **options):
    found = {}
    tasks = [
        pool.Task(name=work.__name__, work=work, args=args, seconds=0.5 if work is hangs else 60)
        for work, *args in works
    ]
    pool.run_all(tasks, jobs=2, done=lambda task, result: found.update({task.name: result}), **options)
    return found


def test_each_module_is_there_that_the_table_is_to_have():
    kinds = modules.MODULES

    assert set(PLAIN) <= set(kinds)


@pytest.mark.parametrize(("device", "least"), [("cpu", 40), ("cuda", 80)])
def test_there_are_enough_cells_and_each_has_a_name_of_its_own(device, least):
    found = cells.select(device)

    assert len({cell.key for cell in found}) == len(found) >= least


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("setting", ["precision", "optimizer"])
def test_settings_are_about_equally_frequent(device, setting):
    frequent = Counter(getattr(cell, setting) for cell in cells.select(device))

    assert max(frequent.values()) - min(frequent.values()) <= 3


def test_every_module_is_measured_at_both_sizes_and_with_recomputed_blocks():
    found = cells.select("cpu")

    for name, kind in modules.available().items():
        own = [cell for cell in found if cell.module == name]
        assert {cell.rows for cell in own} == set(kind.cpu.rows)
        assert {cell.recompute for cell in own} == ({False, True} if kind.has_blocks else {False})


def test_a_piece_of_work_runs_in_a_process_of_its_own():
    assert run((gave, os.getpid()))["gave"] == {"value": 7, "process": True}


def test_what_fails_dies_or_hangs_is_a_result_with_its_error():
    found = run((fails,), (dies,), (hangs,))

    assert found["fails"]["error"] == "ValueError: no such thing"
    assert found["dies"]["error"].startswith("SIGKILL")
    assert found["hangs"]["error"].startswith("no end after")


def test_pieces_that_do_not_fit_beside_one_another_wait():
    running = [pool._Running(task=pool.Task(name="one", work=fails, weight=6), process=None, result=Path())]
    waiting = [pool.Task(name="heavy", work=fails, weight=6), pool.Task(name="light", work=fails, weight=3)]

    assert pool._next(waiting, running, jobs=4, capacity=10).name == "light"
    assert pool._next(waiting, running, jobs=4, capacity=10) is None


def test_quantile_is_the_least_value_that_enough_do_not_exceed():
    quantile = tables.quantile

    assert quantile(range(1, 101), 0.95) == 95
    assert quantile([3.0, 1.0, 2.0], 0.95) == 3.0


def row(predicted, *, confidence="high"):
    return {
        "cell": f"cuda | mlp | {predicted}", "module": "mlp", "device": "cuda", "is_transformer": False,
        "predicted": {"allocated": predicted, "reserved": 120, "confidence": confidence, "seconds": 1.0, "parameters": 9},
        "rival": {"allocated": 95, "seconds": 2.0}, "truth": {"allocated": 100, "reserved": 100},
    }  # fmt: skip


def test_errors_are_signed_and_counted_as_too_low_apart():
    found = accuracy.summarise([row(98), row(101), row(100)])["figures"]["all"]["planner"]

    assert found["median"] == 0
    assert math.isclose(found["worst"], -0.02)
    assert math.isclose(found["under"], 1 / 3)
    assert math.isclose(found["under_by_1_percent"], 1 / 3)


def test_what_is_predicted_with_low_confidence_counts_apart():
    found = accuracy.summarise([row(50, confidence="low"), row(100)])

    assert found["low_confidence"] == 1
    assert found["figures"]["all"]["planner"]["cells"] == 1


def test_what_is_resident_with_a_threshold_is_held_against_what_lives():
    rows = [
        {**row(100), "device": "cpu", "truth": {"allocated": 100 * 10**6}, "threshold": {"reserved": taken * 10**6}}
        for taken in (110, 155)
    ]
    (bar,) = [bar for bar in accuracy.summarise(rows)["bars"] if "resident" in bar["bar"]]

    assert math.isclose(bar["found"], 50.0)
    assert bar["met"] is False


def test_a_cell_with_an_error_is_in_the_tables():
    broken = row(100) | {"predicted": {"error": "KeyError: 'x'"}}

    assert "| predicted | KeyError: 'x' |" in "\n".join(accuracy.tables([broken, row(101)]))


def outcome(*, fits_up_to, planned, rows=96):
    """Return the row of a plan, and the sizes that were tried.

    Micro-batches fit up to a given size.
    """
    tried = []
    finished = []
    lacks, add = (lambda self, key, again: True), (lambda self, one: finished.append(one))
    record = type("Rows", (), {"rows": {}, "lacks": lacks, "add": add})()
    options = type("Options", (), {"only": "", "limit": 1, "again": False, "device": "cpu"})()
    progress = adherence.Progress(record, options)
    progress._rows_of = lambda name: rows
    waiting = [progress.begin()[0]]
    while waiting:
        task = waiting.pop()
        step = task.name.partition(": ")[0]
        size = task.args[3] if step in ("sweep", "smallest") else None
        tried += [size] if size else []
        result = {"free": {"reserved": 1000}, "planned": planned}.get(
            step, {"fits": size is not None and size <= fits_up_to}
        )
        waiting += progress.done(task, result)
    return finished[0], tried, adherence.verdict(finished[0])


def plan(size):
    return {
        "outcome": "trained",
        "micro_batch_size": size,
        "memory_options": {"blocks": 0, "keep_attention": False},
        "reserved": 1,
        "recoveries": 0,
    }


def test_the_fewest_micro_batches_that_fit_are_found_by_halves():
    found, tried, verdict = outcome(fits_up_to=41, planned=plan(10))

    assert found["planned"]["parts"] == 10
    assert tried == [11, 24, 48, 32]
    assert found["true_maximum"] == {"parts": 3, "micro_batch_size": 32}
    assert verdict["ratio"] == 3 / 10


def test_the_search_ends_once_the_next_fewer_micro_batches_do_not_fit():
    found, tried, verdict = outcome(fits_up_to=31, planned=plan(24))

    assert tried == [32]
    assert found["true_maximum"] == {"parts": 4, "micro_batch_size": 24}
    assert verdict["ratio"] == 1


def test_a_size_that_splits_the_batch_equally_is_not_tried():
    assert outcome(fits_up_to=96, planned=plan(48))[1] == [96]


def test_nothing_is_tried_beside_the_whole_batch():
    assert outcome(fits_up_to=96, planned=plan(96))[1] == []


def test_a_refusal_is_a_failure_if_the_smallest_plan_fits():
    refused = {"outcome": "refused", "why": "BudgetError", "recoveries": 0}

    assert outcome(fits_up_to=1, planned=refused)[2]["failed"]
    assert not outcome(fits_up_to=0, planned=refused)[2]["failed"]


def test_a_record_is_taken_up_where_it_ended(tmp_path, capsys):
    kept = {"path": tmp_path / "record.json", "about": {"what": "a test"}, "summarise": len}
    recording.Record(**kept).add({"cell": "one", "truth": {"error": "MemoryError"}})
    again = recording.Record(**kept)

    assert json.loads(capsys.readouterr().out)["cell"] == "one"
    assert not again.lacks("one")
    assert again.lacks("one", again=True)
    assert again.lacks("two")


@pytest.mark.slow
def test_a_small_module_trains_and_its_live_bytes_are_counted():
    check("mlp", "32-true")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", PLAIN)
def test_every_module_trains_in_each_precision_of_a_cpu(name, precision):
    check(name, precision)


def check(name, precision):
    kind = modules.MODULES[name]
    cell = cells.Cell(
        module=name,
        device="cpu",
        precision=precision,
        recompute=kind.has_blocks,
        optimizer="adamw fused",
        rows=kind.cpu.rows[0],
    )
    found = truth.live(cell)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    parameters = list(kind.build("cpu").to(dtype).parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)

    # weights, gradients and two states are there at the end of a step, whatever else is
    assert found["allocated"] >= sum(parameter.nbytes for parameter in parameters) + 3 * trained


@pytest.mark.slow
def test_a_cell_is_predicted_measured_and_compared_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(
        accuracy, "predicted", lambda cell: rival.tracked(cell) | {"confidence": "high", "parameters": 1}
    )
    output = tmp_path / "record.json"
    monkeypatch.setattr(
        sys, "argv", ["x", "--only", "mlp | 32-true", "--limit", "1", "--jobs", "2", "--output", str(output)]
    )
    accuracy.main()
    record = json.loads(output.read_text())

    assert record["summary"]["cells"] == 1
    assert abs(record["summary"]["figures"]["all"]["planner"]["median"]) < 0.05
    run = record["runs"][0]
    # pages that the two rows before have left are used again, so a process can grow by a little less than what lives in it
    assert min(run["process"]["reserved"], run["threshold"]["reserved"]) > 0.95 * run["truth"]["allocated"]
