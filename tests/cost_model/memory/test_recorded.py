"""The model of CUDA's allocator and predictions, compared with recordings of a GPU.

`benchmarks/cost_model/record_allocations.py` made the recordings.
"""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.planner.harness import cells, ours
from tests.support.lanes import some
from tests.support.memory.allocation_replay import replay

FOLDER = Path(__file__).parent / "recorded"
FILES = sorted(FOLDER.glob("*.json.gz"))
MISSING = "no recording is here; run benchmarks/cost_model/record_allocations.py on a machine with a CUDA device"


def entries(events):
    """The numbers of a file as the allocator's entries: a block is known by its number."""
    count = 0
    for event in events:
        if event >= 0:
            yield "alloc", count, event
            count += 1
        else:
            yield "free_requested", -event - 1, 0
            yield "free_completed", -event - 1, 0


def read(file):
    return json.loads(gzip.decompress(file.read_bytes()))


@pytest.mark.skipif(not FILES, reason=MISSING)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_a_recorded_run_has_the_two_peaks_that_the_gpu_had(file):
    found = read(file)
    allocated, reserved = replay(entries(found["events"]), weights=found.get("weights"))
    assert allocated == pytest.approx(found["max_memory_allocated"], rel=0.001)
    assert reserved == pytest.approx(found["max_memory_reserved"], rel=0.001)


@pytest.mark.parametrize("name", some(["cnn_fit", "graph_fit"], "graph_fit"))
def test_what_is_predicted_of_a_fit_before_any_step_is_what_the_gpu_recorded(name):
    found = read(FOLDER / f"{name}.json.gz")
    said = ours.predicted(next(cell for cell in cells.select("cuda") if cell.key == found["cell"]))
    assert said["allocated"] == pytest.approx(found["max_memory_allocated"], rel=0.002)
    assert said["reserved"] == pytest.approx(found["max_memory_reserved"], rel=0.02)


def test_a_file_of_numbers_is_read_as_the_allocator_was_asked():
    assert list(entries([512, 1024, -1])) == [
        ("alloc", 0, 512),
        ("alloc", 1, 1024),
        ("free_requested", 0, 0),
        ("free_completed", 0, 0),
    ]
