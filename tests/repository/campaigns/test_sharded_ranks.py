"""The benchmark of sharded ranks: its sides, how their runs are judged, and ranks that end early."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

import lightning_unified
from benchmarks.overhead.ranks import sharded_ranks
from benchmarks.overhead.ranks.sharded_ranks import Ranks, Side, judge, row, sides
from benchmarks.overhead.ranks.sharding.decoder import LARGE
from benchmarks.overhead.ranks.sharding.rank import Module

GIB = 2**30
OOM = {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "steps": 1}


def options(**given):
    return argparse.Namespace(**{"rounds": 1, "hold": ["auto"], "only": None, **given})


def run_of(kind, hold=None, *, ms=None, capped=False, found=None, predicted=10.1):
    cap = 6 * GIB if capped else None
    one = {"steps_ms": [ms] * 3, "cycles_ms": [ms] * 2, "steps": 6, "allocated": 10 * GIB, "reserved": 5 * GIB}
    one |= {"predicted": predicted * GIB} if kind == "ours" else {}
    return row(Side(kind=kind, hold=hold, capped=capped), [found or one] * 2, cap=cap, seconds=1.0)


def test_every_second_round_is_reversed_and_the_capped_sides_come_last():
    found = [side.name for side in sides(options(rounds=2, hold=["auto", "parameters"]))]

    free = ["bare", "lightning", "ours auto", "ours parameters"]
    assert found == [*free, *reversed(free), "bare capped", "lightning capped", "ours auto capped"]
    assert [side.name for side in sides(options(only=["ours auto"]))] == ["ours auto"]


def test_a_run_that_meets_all_bars_meets_all_bars():
    runs = [run_of("bare", ms=100.0), run_of("lightning", ms=101.0), run_of("ours", "auto", ms=104.0)]
    runs += [run_of(kind, capped=True, found=OOM) for kind in ("bare", "lightning")]
    runs.append(run_of("ours", "auto", ms=150.0, capped=True))

    bars = judge(runs, steps=6)

    assert len(bars) == 7
    assert all(bar["met"] for bar in bars.values()), bars
    assert bars["step of ours auto / lightning"]["value"] == pytest.approx(1.0297)
    assert bars["predicted peak of ours auto, off by"]["value"] == pytest.approx(0.01)


def test_slow_steps_wrong_predictions_and_deaths_miss_their_bars():
    runs = [run_of("bare", ms=100.0), run_of("ours", "auto", ms=106.0, predicted=9.5)]
    runs += [run_of("bare", ms=100.0, capped=True), run_of("ours", "auto", capped=True, found=OOM)]

    bars = judge(runs, steps=6)

    assert {name for name, bar in bars.items() if bar["met"] is False} == {
        "step of ours auto / bare", "bare capped runs out of memory", "ours auto capped goes on", "predicted peak of ours auto, off by",
    }  # fmt: skip
    assert bars["step of ours auto / lightning"] == {"value": None, "limit": 1.03, "met": None}


@pytest.mark.slow
@pytest.mark.parametrize(("hold", "side"), [("shards", "bare"), ("parameters", "ours auto")])
def test_reserved_bytes_of_the_recorded_gpus_are_predicted(hold, side):
    record = json.loads(sharded_ranks.RECORD.read_text(encoding="utf-8"))
    counted = next(run["reserved_gib"][0] for run in record["runs"] if run["side"] == side)
    module = Module({"case": LARGE, "accelerator": "cuda"})
    tokens = torch.zeros(LARGE["rows"], LARGE["length"], dtype=torch.long)

    predicted = lightning_unified.predict(
        module,
        (tokens, tokens),
        device="cuda",
        devices=record["ranks"],
        strategy="unified_fsdp",
        hold=hold,
        precision="bf16-true",
    )

    assert predicted.reserved_bytes / GIB == pytest.approx(counted, rel=1e-3)


def test_ranks_that_hang_after_another_has_ended_are_killed_and_named(monkeypatch, tmp_path):
    programs = ["input(); raise SystemExit('the reason')", "input(); import time; time.sleep(60)"]

    def start(self, work, rank):
        with self._file(rank, "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-c", programs[rank]], stdin=subprocess.PIPE, stderr=log, text=True
            )

    monkeypatch.setattr(Ranks, "_start", start)
    monkeypatch.setattr(sharded_ranks, "GRACE_S", 0.2)
    asked = options(ranks=2, accelerator="cpu", steps=4, rollback=False, limit_s=30.0)

    found = Ranks(Side(kind="bare"), asked, {}, tmp_path).run(cap=None, limit_s=30.0)

    assert found == [
        {"error": "ended with exit code 1: the reason"},
        {"error": "waited for a rank that had ended:"},
    ]
