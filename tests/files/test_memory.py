"""Loading, resuming and saving weights takes little more than their bytes, cache included."""

import json

import pytest

from benchmarks.weight_files.cgroup import missing
from tests.support.lanes import first_cells
from tests.support.programs import run_program

WHY = missing()
SLACK = 40  # MiB beside the weights, whatever their size: pieces in transfer, and what Python allocates

pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)


def peak_of(way, mib, *, slack):
    """Run one way in a group limited to the weights and `slack` MiB.

    Return its peak as a share of the weights.
    """
    result = run_program("benchmarks.weight_files.one", way, mib, "--slack", slack)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["limit_met"] == 0
    return found["peak"] / found["bytes"]


@first_cells(2, "way", ["pretrained", "inference", "resume", "save"])
def test_weights_are_never_in_memory_twice(way):
    assert 0.9 < peak_of(way, 64, slack=SLACK) < 1 + SLACK / 64


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pretrained", "inference", "resume", "save"])
def test_a_gibibyte_of_weights_fits_into_1_15_gibibytes(way):
    assert 0.9 < peak_of(way, 1024, slack=153) < 1.1
