"""A real limit on the address space: plain Lightning fails, "unified" finishes.

The effective batch stays the same.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.programs import run_program

PROGRAM = ROOT / "tests" / "support" / "runs" / "limited.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux only")


@pytest.fixture(scope="module")
def report():
    # a CUDA build cannot even count its devices within the limit, and the limit is meant for the CPU's allocator
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = run_program(PROGRAM, environment=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_plain_lightning_dies_of_it(report):
    assert "can't allocate memory" in report["plain"]


def test_the_unified_strategy_finishes_with_the_whole_batch_in_every_step(report):
    assert report["steps"] == 4
    assert report["recoveries"] >= 1
    assert report["micro_batch_size"] < report["effective_batch_size"] == 32


@pytest.mark.slow
def test_a_stack_of_blocks_of_which_not_one_row_fits_trains_by_recomputing_them():
    program = PROGRAM.with_name("limited_blocks.py")
    # or glibc keeps what was freed in a heap too fragmented to serve the next attempt, and the address space is what is limited
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    kept, auto = (
        subprocess.run(
            [sys.executable, program, how], capture_output=True, text=True, env=environment, timeout=120, check=False
        )
        for how in ("false", "auto")
    )

    assert kept.returncode != 0
    assert "OutOfMemoryError" in kept.stderr
    assert auto.returncode == 0, auto.stderr
    report = json.loads(auto.stdout.splitlines()[-1])
    assert report["steps"] == 3
    assert report["recompute"] == "because memory ran out: 24 blocks of blocks (Block), detected"
