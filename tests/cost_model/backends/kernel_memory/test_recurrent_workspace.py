"""Workspaces of cuDNN's recurrences equal those of a GPU (`benchmarks/planner/kernels.py`)."""

import json
from pathlib import Path

from lightning_unified.cost_model.backends.kernel_memory.recurrent_workspace import Recurrence, workspace_bytes

COLUMNS, *MEASURED = json.loads(Path(__file__).with_name("cudnn_recurrences.json").read_text())
CALLS = [dict(zip(COLUMNS, row, strict=True)) for row in MEASURED]


def error(call):
    sizes = {name: value for name, value in call.items() if name != "workspace"}
    return abs(workspace_bytes(Recurrence(**sizes)) / call["workspace"] - 1)


def test_most_workspaces_are_within_two_percent():
    errors = sorted(error(call) for call in CALLS)
    assert errors[len(errors) // 2] < 0.002
    assert errors[int(0.75 * len(errors))] < 0.02


def test_large_workspaces_are_within_three_percent():
    assert max(error(call) for call in CALLS if call["workspace"] >= 400 * 2**20) < 0.03
