"""SLURM's signal stops all ranks at one step, and the requeued job goes on as if undisturbed."""

import json
import os
import signal
import stat

import pytest
import torch

from tests.support.ranks.launched import TINY, Launched, slurm_variables

LINE = ("trainer.strategy=unified_ddp", "run_dir=run", "resume=auto", "model.schedule=constant", *TINY)


@pytest.fixture
def slurm(tmp_path):
    """Start a job of two ranks with a `scontrol` that notes its arguments and gives an exit code."""

    def start(*arguments, code=0, **more):
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        scontrol = programs / "scontrol"
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.txt\nexit {code}\n')
        scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
        path = {"PATH": f"{programs}:{os.environ['PATH']}"}
        return Launched(*LINE, *arguments, cwd=tmp_path, variables=slurm_variables, **path, **more)

    return start


def stopped(ranks, folder, *signals):
    ranks.until(lambda: list(folder.glob("run/metrics.csv")))
    for number, rank in signals:
        ranks.send(number, rank=rank)
    return ranks.wait()


def weights_of(folder):
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
def test_slurms_signal_to_one_rank_saves_on_all_and_requeues_the_job_once(slurm, tmp_path):
    done = stopped(slurm("trainer.max_steps=100000"), tmp_path, (signal.SIGUSR1, 1))
    summary = json.loads((tmp_path / "run/summary.json").read_text())

    assert [each.returncode for each in done] == [0, 0], done
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"
    assert summary["stopped"] == "SIGUSR1"
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == summary["steps"]
    assert f"Stopped by SIGUSR1 after step {summary['steps']}" in done[0].stdout
    assert "SLURM job 4711 is requeued." in done[0].stdout
    assert "srun --nodes=1 --ntasks-per-node=2 " in done[0].stdout


@pytest.mark.slow
def test_a_job_that_cannot_be_requeued_ends_with_143(slurm, tmp_path):
    options = ("trainer.max_steps=100000", "callbacks.interrupt.requeue_signal=SIGUSR2")
    done = stopped(slurm(*options, code=1), tmp_path, (signal.SIGUSR2, 0))

    assert [each.returncode for each in done] == [143, 143], done
    assert "SLURM job 4711 is not requeued: scontrol requeue 4711 ended with exit code 1" in done[0].stdout


@pytest.mark.slow
def test_the_end_of_the_job_during_its_requeue_interrupts_nothing(slurm, tmp_path):
    signals = [(number, rank) for number in (signal.SIGUSR1, signal.SIGTERM) for rank in (0, 1)]
    done = stopped(slurm("trainer.max_steps=100000"), tmp_path, *signals)

    assert [each.returncode for each in done] == [0, 0], done
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"


@pytest.mark.slow
def test_a_requeued_job_ends_with_the_weights_of_an_undisturbed_one(slurm, tmp_path):
    stopped(slurm("trainer.max_steps=100000"), tmp_path, (signal.SIGUSR1, 1))
    steps = json.loads((tmp_path / "run/summary.json").read_text())["steps"] + 5
    resumed = slurm(f"trainer.max_steps={steps}", SLURM_RESTART_COUNT="1").wait()
    undisturbed = slurm(f"trainer.max_steps={steps}", "run_dir=straight").wait()
    again = slurm(f"trainer.max_steps={steps}").wait()
    ends = [weights_of(tmp_path / name) for name in ("run", "straight")]

    assert [each.returncode for each in (*resumed, *undisturbed, *again)] == [0] * 6, resumed
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert "run is done; it is left as it is." in again[0].stdout
