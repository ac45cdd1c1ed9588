"""A run leaves what it promises, and a resumed one goes on as if it had never stopped."""

import csv
import json
import shlex

import pytest
import torch
from omegaconf import OmegaConf

from tests.repository.public_surface.records import key_lines
from tests.repository.public_surface.subjects import check

FILES = (
    "config.yaml",
    "plan.json",
    "metrics.csv",
    "events.jsonl",
    "samples.txt",
    "summary.json",
    "checkpoints/last.ckpt",
    "checkpoints/best.ckpt",
    "plots/loss.png",
    "plots/memory.png",
)


@pytest.fixture
def done(command, tiny):
    """Twelve steps, so that a memory row (every tenth batch) is among them."""
    return command("memory=small", "trainer.max_steps=12", "run_dir=run", "seed=3", *tiny)


def test_a_run_keeps_its_contract(done, tmp_path):
    """One run, looked at from all sides: each run costs seconds."""
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    config = OmegaConf.load(run / "config.yaml")
    plan = json.loads((run / "plan.json").read_text())
    rows = list(csv.DictReader((run / "metrics.csv").open()))

    assert (done.code, done.err) == (0, "")
    assert [file for file in FILES if not (run / file).is_file()] == []
    assert list(run.glob("events.out.tfevents.*"))
    check("summary", key_lines(summary))
    assert (summary["steps"], summary["effective_batch_size"], summary["micro_batch_size"]) == (12, 8, 4)
    assert summary["parameters"] > 0
    assert summary["budget_bytes"] == 8 * 2**30
    assert summary["peak_bytes"]["measured"] > 0
    assert summary["peak_bytes"]["predicted"] is None
    assert summary["tokens_per_second"] > 0
    assert {"loss", "perplexity", "bigram_perplexity", "trigram_perplexity"} <= set(summary["validation"])
    assert summary["test"] is None  # the data hold no test set
    assert summary["checkpoint"] == str(run / "checkpoints" / "last.ckpt")
    assert summary["resume_command"] == "python train.py resume=run"
    assert not OmegaConf.is_missing(config, "run_dir")
    assert "${" not in (run / "config.yaml").read_text()
    assert (config.seed, config.hardware.name, config.memory.precision) == (3, "cpu", "auto")
    assert plan["micro_batch_size"] == 4
    agreed, noise = plan["events"]  # what the exactness check found and cannot avoid; nothing else happened
    assert agreed.startswith("micro-batches weighted by loss_is_sum: gradients of 8 rows, whole and split, differ by ")
    assert noise == "random draws, such as dropout's, are made for each micro-batch, not for the whole batch"
    assert {"budget", "micro_batch_size", "precision", "recompute"} <= set(plan["reasons"])
    assert any(row["val/loss"] for row in rows)
    assert any(row["memory/allocated"] and row["speed/samples_per_second"] and row["train/loss"] for row in rows)
    for text in (
        "budget",
        "8.00 GiB (up to 8GiB)",
        "8 rows for the optimizer, 8 to validate",
        "0 worker processes, pin memory off",
        "finite in every step",
        "micro-batches of up to 4 rows",
        " documents to train, ",
        "; vocabulary of ",
        "Kneser–Ney trigram",
        "Samples of its text",
        "python train.py resume=run",
    ):
        assert text in done.out


def damage(file):
    """Replace a file; it may share its bytes with others by hard links."""
    file.unlink()
    file.write_bytes(b"no checkpoint")


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_one_that_never_stopped(command, tiny, tmp_path):
    steady = ("model.schedule=constant", *tiny)
    whole = command("memory=small", "trainer.max_steps=6", "run_dir=whole", *steady)
    first = command("memory=small", "trainer.max_steps=3", "run_dir=parts", *steady)
    second = command("resume=parts", "trainer.max_steps=6")
    weights = {
        name: torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=False)["state_dict"]
        for name in ("whole", "parts")
    }
    steps = [row["step"] for row in csv.DictReader((tmp_path / "parts/metrics.csv").open())]

    assert (whole.code, first.code, second.code) == (0, 0, 0)
    assert all(torch.equal(value, weights["parts"][name]) for name, value in weights["whole"].items())
    assert "trainer.max_steps: 3 → 6" in second.out
    assert "3 steps since step 3" in second.out
    assert steps == sorted(steps, key=int)
    assert len(steps) > 1
    assert OmegaConf.load(tmp_path / "parts/config.yaml").trainer.max_steps == 6

    again = command("resume=parts")
    assert again.code == 2
    assert "already done its 6 steps; add trainer.max_steps=12" in again.err

    files = tmp_path / "parts/checkpoints"
    damage(files / "last.ckpt")
    broken = command("resume=parts", "trainer.max_steps=9")
    assert broken.code == 1
    assert "last.ckpt cannot be read" in broken.err
    assert "copy best.ckpt over it" in broken.err

    for file in files.glob("*.ckpt"):
        damage(file)
    lost = command("resume=parts", "trainer.max_steps=9")
    assert "no other checkpoint beside it can be read" in lost.err


@pytest.mark.slow
def test_a_sweep_names_its_runs_and_goes_on_past_a_failing_one(command, tiny, tmp_path):
    done = command("-m", "memory.micro_batch_size=0,2", "trainer.max_steps=2", "run_dir=sweep", *tiny)

    assert done.code == 2
    assert "memory.micro_batch_size=0" in done.err
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()) == [
        "memory.micro_batch_size=0",
        "memory.micro_batch_size=2",
    ]
    assert not (tmp_path / "sweep/memory.micro_batch_size=0/summary.json").exists()
    summary = json.loads((tmp_path / "sweep/memory.micro_batch_size=2/summary.json").read_text())
    resumed = command(*shlex.split(summary["resume_command"])[2:], "trainer.max_steps=3")

    assert resumed.code == 0
    assert "1 steps since step 2" in resumed.out


def test_the_hardware_is_found_where_none_is_named(command, tiny):
    done = command(
        "trainer.max_steps=1", "run_dir=run", "hardware=auto", *(each for each in tiny if each != "hardware=cpu")
    )

    assert done.code == 0
    assert "hardware=auto found hardware=" in done.out


@pytest.mark.slow
def test_another_strategy_of_lightning_can_be_compared_with(command, tiny, tmp_path):
    done = command("trainer.strategy=auto", "trainer.max_steps=2", "run_dir=run", *tiny)
    summary = json.loads((tmp_path / "run/summary.json").read_text())

    assert done.code == 0
    assert (summary["micro_batch_size"], summary["recoveries"], summary["budget_bytes"]) == (None, None, None)
    assert "none: only the unified strategies keep a budget" in done.out


@pytest.mark.slow
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(command, tiny, tmp_path):
    steady = ("memory=debug", "data.drop_last=false", "model.schedule=constant", *tiny)
    assert command("trainer.max_steps=2", "run_dir=run", *steady).code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused = command("resume=run", "trainer.max_steps=4", "memory=small")

    assert refused.code == 2
    assert "an order that this loader does not have (batch_size 4 -> 8)" in refused.err
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files


@pytest.mark.slow
def test_a_resumed_run_writes_where_it_is_now_and_no_run_is_written_over(command, tiny, tmp_path):
    assert command("memory=small", "trainer.max_steps=2", "run_dir=run", *tiny).code == 0
    again = command("memory=small", "trainer.max_steps=2", "run_dir=run", *tiny)
    before = (tmp_path / "run/checkpoints/last.ckpt").read_bytes()
    other = command("resume=run", "trainer.max_steps=3", "run_dir=other")
    (tmp_path / "other").rename(tmp_path / "moved")
    moved = command("resume=moved", "trainer.max_steps=4")
    summary = json.loads((tmp_path / "moved/summary.json").read_text())

    assert again.code == 2
    assert "run_dir=run holds the checkpoints of another run; resume=run goes on with it" in again.err
    assert (other.code, moved.code) == (0, 0)
    assert (tmp_path / "run/checkpoints/last.ckpt").read_bytes() == before
    assert not (tmp_path / "other").exists()
    assert (summary["steps"], summary["checkpoint"]) == (4, str(tmp_path / "moved/checkpoints/last.ckpt"))
