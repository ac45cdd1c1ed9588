"""Runs of several ranks that torchrun or the strategy starts: one directory, one error, one exit code."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from lightning_unified.cli.watch.runs import running
from lightning_unified.hardware import Sources
from tests.support import ROOT
from tests.support.lanes import slow
from tests.support.ranks.launched import LIMIT_S, TINY, TRAIN, Launched, real_torchrun, wait_until

README = re.search(r"`torchrun ([^`]*train\.py [^`]*)`", (ROOT / "README.md").read_text("utf-8"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
DDP = "trainer.strategy=unified_ddp"


def forked(flags, arguments, cwd):
    """Start the ranks that torchrun would start."""
    assert flags == ["--standalone", "--nproc-per-node", "2"]
    first, second = Launched(*arguments, cwd=cwd).wait()
    assert (second.returncode, second.stdout) == (0, "")
    return first


def by_torchrun(flags, arguments, cwd):
    return ran([sys.executable, "-m", "torch.distributed.run", *flags, str(TRAIN), *arguments], cwd)


def ran(command, cwd):
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("starts", [forked, slow(by_torchrun)])
def test_the_readmes_line_trains_two_ranks_into_one_directory(tmp_path, starts):
    assert README is not None
    line = README[1].split()
    place = line.index("train.py")
    done = starts(line[:place], [*line[place + 1 :], *TINY, "trainer.max_steps=2"], tmp_path)
    (run,) = (tmp_path / "runs/gearhead").iterdir()
    summary = json.loads((run / "summary.json").read_text())

    assert done.returncode == 0, done.stderr
    assert (summary["steps"], summary["ranks"], summary["effective_batch_size"]) == (2, 2, 4)
    assert summary["resume_command"].startswith("torchrun --standalone --nproc-per-node 2 ")
    assert done.stdout.count("\nSummary\n") == 1
    assert OmegaConf.load(run / "config.yaml").trainer.devices == 2
    assert (run / "checkpoints/last.ckpt").is_file()


def test_a_refused_request_is_said_once(tmp_path):
    done = Launched(DDP, "memory.budgt=1GiB", cwd=tmp_path).wait()

    assert [each.returncode for each in done] == [2, 2]
    assert sum(each.stderr.count("this cannot be run: memory.budgt") for each in done) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_strategy_of_one_device_is_refused(tmp_path):
    done = Launched(*TINY, "run_dir=run", cwd=tmp_path).wait()

    assert [each.returncode for each in done] == [2, 2]
    assert sum("add trainer.strategy=unified_ddp" in each.stderr for each in done) == 1


def test_sigterm_to_one_rank_saves_on_all_and_ends_them_with_143(tmp_path):
    options = {"cwd": tmp_path, "LIGHTNING_UNIFIED_STATE_DIR": str(tmp_path / "state")}
    ranks = Launched(DDP, *TINY, "trainer.max_steps=100000", "run_dir=run", **options)
    ranks.until(lambda: len(list(tmp_path.glob("state/runs/*.json"))) == 2 and list(tmp_path.glob("run/metrics.csv")))
    watched = running(tmp_path / "state/runs", Sources.without_torch())
    ranks.send(signal.SIGTERM, rank=1)
    done = ranks.wait()
    summary = json.loads((tmp_path / "run/summary.json").read_text())

    assert [each.returncode for each in done] == [143, 143], done
    assert summary["stopped"] == "SIGTERM"
    assert f"Stopped by SIGTERM after step {summary['steps']}" in done[0].stdout
    assert done[1].stdout == ""
    assert sorted(each.figures.rank for each in watched) == [0, 1]
    assert {(each.figures.ranks, each.figures.run) for each in watched} == {(2, watched[0].figures.run)}
    assert {each.figures.directory for each in watched} == {str(tmp_path / "run")}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_killed_rank_ends_the_others_with_the_command_to_go_on(tmp_path, lost):
    ranks = Launched(
        DDP, *TINY, "trainer.max_steps=100000", "callbacks.checkpoint.every_n_steps=1", "run_dir=run", cwd=tmp_path
    )
    ranks.until(lambda: list(tmp_path.glob("run/checkpoints/last.ckpt"))).send(signal.SIGKILL, rank=lost)
    done = ranks.wait(120)
    left = done[1 - lost]

    assert left.returncode == 1
    assert f"no answer from rank {lost}" in left.stderr
    assert re.search(r"Kept: run/checkpoints/last\.ckpt of step \d+\. Go on with 1 of 2 ranks: ", left.stderr)
    assert re.search(r"torchrun --standalone --nproc-per-node 1 \S*train\.py resume=run", left.stderr)


@pytest.mark.slow
def test_torchruns_signal_after_a_loss_does_not_hide_the_error(tmp_path):
    """It sends SIGTERM to the other ranks at once."""
    options = ["trainer.max_steps=100000", "callbacks.checkpoint.every_n_steps=1", "run_dir=run"]
    command = real_torchrun(TRAIN, DDP, *TINY, *options, size=3, cwd=tmp_path)
    torchrun = subprocess.Popen(
        [*command, "data.batch_size=6"], cwd=tmp_path, env=ENVIRONMENT, stdout=-1, stderr=-1, text=True
    )
    try:
        wait_until(lambda: list(tmp_path.glob("run/checkpoints/last.ckpt")), lambda: torchrun.poll() is None)
        os.kill(children_of(torchrun.pid)[1], signal.SIGKILL)
        _, err = torchrun.communicate(timeout=120)
    finally:
        torchrun.kill()

    assert torchrun.returncode == 1
    assert err.count("error: no answer from rank ") == 1
    assert "Go on with 2 of 3 ranks: torchrun --standalone --nproc-per-node 2 " in err


@pytest.mark.slow
def test_the_strategys_own_launcher_ends_with_code_1_and_no_orphans(tmp_path):
    options = ["trainer.max_steps=100000", "callbacks.checkpoint.every_n_steps=1", "run_dir=run", "trainer.devices=2"]
    command = [sys.executable, str(TRAIN), DDP, *TINY, *options]
    first = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=-1, stderr=-1, text=True)
    try:
        wait_until(lambda: list(tmp_path.glob("run/checkpoints/last.ckpt")), lambda: first.poll() is None)
        (second,) = children_of(first.pid)
        os.kill(second, signal.SIGKILL)
        _, err = first.communicate(timeout=120)
    finally:
        first.kill()

    assert first.returncode == 1
    assert "Go on with 1 of 2 ranks: " in err and "resume=run trainer.devices=1" in err
    gone_on = ran(
        [sys.executable, str(TRAIN), "resume=run", "trainer.devices=1", f"trainer.max_steps={step_of(err) + 2}"],
        tmp_path,
    )
    assert gone_on.returncode == 0, gone_on.stderr


@pytest.mark.slow
def test_ranks_whose_first_one_is_killed_end_too(tmp_path):
    command = [sys.executable, str(TRAIN), DDP, *TINY, "trainer.max_steps=100000", "run_dir=run", "trainer.devices=2"]
    first = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=-3, stderr=-3)
    try:
        wait_until(lambda: list(tmp_path.glob("run/metrics.csv")), lambda: first.poll() is None)
        (second,) = children_of(first.pid)
    finally:
        first.kill()
        first.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{second}"), lambda: True, limit_s=60)

    assert not os.path.exists(f"/proc/{second}")


@pytest.mark.slow
def test_a_plain_script_trains_under_torchrun(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    done = ran(real_torchrun(script, cwd=tmp_path), tmp_path)

    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]


PLAIN = """
import lightning as L, lightning_unified
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = L.Trainer(strategy="unified_ddp", accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0)
trainer.fit(BoringModel())
assert trainer.global_step == 2
print(f"rank {trainer.global_rank} of {trainer.world_size}\\n", end="", flush=True)
"""


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split() if is_train(child)]


def is_train(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return "train.py" in file.read()


def step_of(text):
    return int(re.findall(r"of step (\d+)", text)[0])
