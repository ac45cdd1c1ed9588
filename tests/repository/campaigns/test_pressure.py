"""One run of the pressure campaign, with a real process that takes the memory.

The run gives way and learns the same as an undisturbed one.
"""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT

CAMPAIGN = ROOT / "benchmarks" / "recovery" / "pressure_campaign.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the machine is made of Linux's limits")


@pytest.mark.slow
def test_a_run_beside_a_hog_sheds_survives_and_learns_the_same(tmp_path):
    output = tmp_path / "record.json"
    arguments = ["--index", "7", "--batches", "60", "--every-s", "0.1", "--output", str(output)]
    done = subprocess.run([sys.executable, CAMPAIGN, *arguments], capture_output=True, text=True, check=False)
    assert output.exists(), done.stderr
    (run,) = json.loads(output.read_text())["runs"]

    assert done.returncode == 0, run
    assert run["ended"] in ("went on", "stopped, then resumed")
    assert (run["steps_lost"], run["difference"], run["other_state"]) == (0, 0.0, [])
    assert run["smallest"] < 32
    assert run["shed_s"] is not None
