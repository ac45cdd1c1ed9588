"""The fine-tune on Python's documentation: its record, and a short run on packaged weights."""

import json
import subprocess
import sys

import pytest

from lightning_unified.models.causal_lm.weights import find_language_model
from tests.support import ROOT

FOLDER = ROOT / "benchmarks" / "models" / "finetune"
PAGE = (ROOT / "docs" / "models" / "finetune.md").read_text(encoding="utf-8")


def test_the_page_gives_the_figures_of_the_record():
    record = json.loads((FOLDER / "docstrings.json").read_text(encoding="utf-8"))
    losses, peak = record["evaluation"]["losses"], record["run"]["peak_bytes"]

    assert record["fall"] == pytest.approx(1 - losses["model"] / losses["base"])
    assert record["fall"] > record["margin"]
    assert record["seconds"]["whole"] < 600
    assert peak["measured"] <= record["run"]["budget_bytes"]
    assert f"| {losses['base']:.3f} | {losses['model']:.3f} | {record['fall']:.1%} |".replace("%", " %") in PAGE


@pytest.mark.slow
def test_a_short_run_lowers_the_held_out_loss_by_a_twentieth(tmp_path):
    try:
        find_language_model("smollm2-135m")
    except (FileNotFoundError, RuntimeError) as error:
        pytest.skip(str(error))
    output = tmp_path / "record.json"
    short = ("trainer.max_steps=6", "data.val_fraction=0.02", "--samples", "0", "--threads", "1", "--margin", "0.05")
    command = [sys.executable, "-m", "benchmarks.models.finetune.docstrings", *short, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["fall"] >= 0.05
    assert record["run"]["steps"] == 6
