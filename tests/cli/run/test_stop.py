"""A run that a signal stops saves first.

Processes and signals are real.
"""

import signal
import time

import pytest

from tests.support import ROOT
from tests.support.programs import Program

TRAIN = ROOT / "train.py"
DEADLINE = 120


def when_training(program, metrics):
    """Wait until the run writes metrics."""
    end = time.monotonic() + DEADLINE
    while not list(metrics()) and program.runs and time.monotonic() < end:
        time.sleep(0.1)
    return program


def test_a_terminated_run_saves_and_returns_143(tiny, tmp_path):
    program = Program(TRAIN, "memory=debug", "trainer.max_steps=1000000", "run_dir=run", *tiny, cwd=tmp_path)
    when_training(program, lambda: tmp_path.glob("run/metrics.csv")).send(signal.SIGTERM)
    done = program.wait(DEADLINE)
    out = done.stdout + done.stderr

    assert done.returncode == 143, out
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    assert "Traceback" not in out
    assert "resume=run" in out


@pytest.mark.slow
def test_an_interrupt_saves_and_ends_the_whole_sweep_with_success(tiny, tmp_path):
    sweep = ("-m", "memory=debug,small", "trainer.max_steps=1000000", "run_dir=sweep")
    program = Program(TRAIN, *sweep, *tiny, cwd=tmp_path)
    when_training(program, lambda: tmp_path.glob("sweep/*/metrics.csv")).send(signal.SIGINT)
    done = program.wait(DEADLINE)
    out = done.stdout + done.stderr

    assert done.returncode == 0, out
    assert [path.parts[-3] for path in tmp_path.glob("sweep/*/checkpoints/last.ckpt")] == ["memory=debug"]
    assert "Traceback" not in out
