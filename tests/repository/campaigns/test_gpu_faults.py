"""A sample of the campaign of GPU faults: each kind is detected, and loses nothing."""

from benchmarks.recovery.gpu import faults as gpu_faults
from tests.support.lanes import first_cells


@first_cells(3, "kind", gpu_faults.KINDS)
def test_a_fault_of_each_kind_is_detected_and_loses_nothing(tmp_path, kind):
    run = gpu_faults.judged(tmp_path, 1, kind)

    assert run["operations lost"]
    assert run["detected"] == run["struck"] > 0
    assert run["same"] is not False


def test_the_campaign_counts_a_fault_that_nothing_detected():
    run = {"kind": "forward", "operations lost": 3, "struck": 2, "detected": 1, "stopped": False, "same": False}
    found = gpu_faults.totals([run])["forward"]

    assert (found["runs with an undetected fault"], found["weights differ"]) == (1, 1)
