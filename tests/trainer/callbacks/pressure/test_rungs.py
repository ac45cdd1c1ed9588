"""The direction that samples of memory pressure call for, as a table."""

import pytest

from lightning_unified.callbacks.pressure.rungs import Direction, direction_of
from lightning_unified.callbacks.pressure.watch import Verdict
from lightning_unified.hardware import Figure, Pressure

UNKNOWN = Pressure(
    level="unknown", available=Figure(None, "unknown"), swap_out_bytes_per_s=None, stall_share=None, reasons=()
)


@pytest.mark.parametrize(
    ("counts", "rung", "acted_at", "expected"),
    [
        ({"pressed": 1}, 0, 0, Direction.STAY),
        ({"pressed": 2}, 0, 0, Direction.UP),
        ({"pressed": 4}, 1, 6, Direction.STAY),
        ({"pressed": 5}, 1, 5, Direction.UP),
        ({"pressed": 9}, 1, 6, Direction.STAY),
        ({"pressed": 2, "critical": 2}, 0, 0, Direction.UP_TO_STOP),
        ({"pressed": 9, "critical": 9}, 3, 9, Direction.STAY),
        ({"pressed": 9, "critical": 9}, 3, 8, Direction.UP_TO_STOP),
        ({"calm": 9}, 0, 0, Direction.STAY),
        ({"calm": 5}, 2, 5, Direction.DOWN),
        ({"calm": 9}, 2, 6, Direction.STAY),
        ({}, 2, 0, Direction.STAY),
    ],
)
def test_a_level_leads_on_after_enough_samples_since_the_last_action(counts, rung, acted_at, expected):
    verdict = Verdict(pressure=UNKNOWN, index=10, **counts)

    assert direction_of(verdict, rung=rung, acted_at=acted_at, samples=2) == expected
