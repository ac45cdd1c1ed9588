"""A sweep that is started again skips what is done, continues the interrupted, runs the rest."""

import json
import signal

import pytest
import torch

from tests.support.programs import Program
from tests.support.ranks.launched import LIMIT_S, TRAIN, wait_until

RATES = "model.learning_rate=0.001,0.01,0.1"
SWEEP = ("-m", RATES, "memory=debug", "trainer.max_steps=150", "callbacks.checkpoint.every_n_steps=1", "run_dir=sweep")
FIRST, SECOND, THIRD = (f"sweep/model.learning_rate={rate}" for rate in ("0.001", "0.01", "0.1"))


def weights_of(path):
    return torch.load(path / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
def test_a_sweep_killed_in_the_middle_does_only_what_was_left(command, tiny, tmp_path):
    program = Program(TRAIN, *SWEEP, *tiny, cwd=tmp_path)
    wait_until(lambda: list(tmp_path.glob(f"{SECOND}/checkpoints/last.ckpt")), lambda: program.runs)
    program.send(signal.SIGKILL)
    program.wait(LIMIT_S)
    done = (tmp_path / FIRST / "checkpoints/last.ckpt").stat().st_mtime_ns
    there = [(tmp_path / each / "summary.json").is_file() for each in (FIRST, SECOND, THIRD)]
    again = command(*SWEEP, "resume=auto", *tiny)
    straight = command("memory=debug", "model.learning_rate=0.01", "trainer.max_steps=150", "run_dir=straight", *tiny)
    steps = [json.loads((tmp_path / each / "summary.json").read_text())["steps"] for each in (FIRST, SECOND, THIRD)]
    ends = [weights_of(tmp_path / each) for each in (SECOND, "straight")]

    assert there == [True, False, False]
    assert (again.code, straight.code) == (0, 0), again.err
    assert steps == [150, 150, 150]
    assert again.out.count("is done; it is left as it is.") == 1
    assert again.out.count("continuing ") == 1
    assert (tmp_path / FIRST / "checkpoints/last.ckpt").stat().st_mtime_ns == done
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())

    named = command("-m", "resume=sweep")
    assert named.code == 0, named.err
    assert named.out.count("is done; it is left as it is.") == 3


@pytest.mark.slow
def test_the_same_sweep_again_runs_only_what_is_missing_or_was_changed(command, tiny, tmp_path):
    def sweep(rates):
        line = ("-m", f"model.learning_rate={rates}", "memory=debug", "trainer.max_steps=1", "run_dir=sweep")
        return command(*line, "resume=auto", *tiny)

    first, second = sweep("0.001,0.01"), sweep("0.001,0.01,0.1")
    further = command("-m", "resume=sweep", "trainer.max_steps=2")
    steps = {path.parent.name: json.loads(path.read_text())["steps"] for path in tmp_path.glob("sweep/*/summary.json")}

    assert (first.code, second.code, further.code) == (0, 0, 0), further.err
    assert [each.out.count("is done; it is left as it is.") for each in (first, second, further)] == [0, 2, 0]
    assert further.out.count("trainer.max_steps: 1 → 2") == 3
    assert steps == {f"model.learning_rate={rate}": 2 for rate in ("0.001", "0.01", "0.1")}


def test_resume_auto_begins_then_goes_on_and_then_leaves_the_run_alone(command, tiny, tmp_path):
    line = ("memory=debug", "run_dir=run", "resume=auto", *tiny)
    outs = [command(*line, f"trainer.max_steps={steps}") for steps in (1, 2, 2)]

    assert [each.code for each in outs] == [0, 0, 0], outs
    assert "continuing" not in outs[0].out
    assert "trainer.max_steps: 1 → 2" in outs[1].out
    assert "run is done; it is left as it is." in outs[2].out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["resume=auto"], "give run_dir, without the time in its name"),
        (["-m", "resume=nowhere"], "not the directory of a sweep"),
    ],
)
def test_what_cannot_be_continued_is_said(command, line, said):
    refused = command(*line)

    assert refused.code == 2
    assert said in refused.err
