"""Pressure on the host of one rank makes all ranks give way after the same batch."""

import json

import pytest
import torch

from tests.support.lanes import slow
from tests.support.ranks.pressed_runs import pressed
from tests.support.ranks.processes import on_ranks


@pytest.mark.parametrize("strategy", ["unified_ddp", slow("ddp")])
def test_pressure_on_the_second_rank_shrinks_saves_and_stops_both(tmp_path, strategy):
    first, second = on_ranks(pressed, str(tmp_path), strategy)
    written = [json.loads(line) for line in (tmp_path / "pressure.jsonl").read_text().splitlines()]
    said = " (memory pressure: the test says critical, on rank 1)"
    shrunk = f"micro-batch shrunk to 4 rows{said}" if strategy == "unified_ddp" else "shrink skipped: DDPStrategy"

    assert first["steps"] == second["steps"] == (5 if strategy == "unified_ddp" else 4)
    assert first["stopped_for"] == second["stopped_for"] == "memory pressure: the test says critical, on rank 1"
    assert first["saved"] == second["saved"] == first["steps"]
    assert torch.equal(first["weights"], second["weights"])
    assert any(line["action"].startswith(shrunk) for line in written)
    assert {line["level"] for line in written} == {"normal"}
    if strategy == "unified_ddp":
        assert (first["largest"], second["largest"]) == (4, 4)
