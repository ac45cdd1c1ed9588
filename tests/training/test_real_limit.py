"""A real limit on the address space: plain Lightning dies, `strategy="unified"` finishes with the same effective batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "limited.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux only")


def limited(strategy: str) -> subprocess.CompletedProcess:
    # a CUDA build cannot even count its devices within the limit, and the limit is meant for the CPU's allocator
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, PROGRAM, strategy], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def test_plain_lightning_dies_of_it():
    result = limited("auto")

    assert result.returncode != 0
    assert "can't allocate memory" in result.stderr


def test_the_unified_strategy_finishes_with_the_whole_batch_in_every_step():
    result = limited("unified")

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["steps"] == 4
    assert report["recoveries"] >= 1
    assert report["micro_batch_size"] < report["effective_batch_size"] == 32
