"""A run that a signal stops saves first.

Processes and signals are real.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 120


def start(*arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def when_training(process, metrics):
    """Wait until the run writes metrics."""
    end = time.monotonic() + DEADLINE
    while not list(metrics()) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    return process


def test_a_terminated_run_saves_and_returns_143(tiny, tmp_path):
    process = start("memory=debug", "trainer.max_steps=1000000", "run_dir=run", *tiny, cwd=tmp_path)
    when_training(process, lambda: tmp_path.glob("run/metrics.csv")).send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=DEADLINE)

    assert process.returncode == 143, out
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    assert "Traceback" not in out
    assert "resume=run" in out


@pytest.mark.slow
def test_an_interrupt_saves_and_ends_the_whole_sweep_with_success(tiny, tmp_path):
    process = start("-m", "memory=debug,small", "trainer.max_steps=1000000", "run_dir=sweep", *tiny, cwd=tmp_path)
    when_training(process, lambda: tmp_path.glob("sweep/*/metrics.csv")).send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=DEADLINE)

    assert process.returncode == 0, out
    assert [path.parts[-3] for path in tmp_path.glob("sweep/*/checkpoints/last.ckpt")] == ["memory=debug"]
    assert "Traceback" not in out
