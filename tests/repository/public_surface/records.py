"""The keys of the JSON that scripts read: of `doctor`, `plan` and `watch`, and of `summary.json`."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from tests.support import ROOT

__all__ = ["doctor_lines", "key_lines", "plan_lines", "summary_lines", "watch_lines"]

SIMULATED = "m1-8gb"  # doctor looks at this machine, so that the keys do not depend on the one that runs the tests
ENVIRONMENT = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.0"}  # doctor warns of it: `environment` has an entry with keys
SMALL_MODEL = (
    "data=builtin",
    "memory=small",
    "model.width=16",
    "model.heads=2",
    "model.layers=1",
    "model.feed_forward=16",
)
SMALL_RUN = ("hardware=cpu", *SMALL_MODEL, "trainer.enable_progress_bar=false", "trainer.max_steps=2")


def key_lines(value: object, prefix: str = "") -> list[str]:
    """Return the dotted keys of a JSON value in their order.

    `[]` stands for the entries of a list, taken together.
    """
    if isinstance(value, dict) and value:
        return [line for key, inner in value.items() for line in key_lines(inner, f"{prefix}.{key}".lstrip("."))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return list(dict.fromkeys(line for entry in value for line in key_lines(entry, f"{prefix}[]")))
    return [prefix]


def doctor_lines() -> list[str]:
    """Return the keys of `doctor --json`."""
    with patch.dict(os.environ, ENVIRONMENT):
        return _keys_printed_by("doctor", "--json", "--simulate", SIMULATED)


def plan_lines() -> list[str]:
    """Return the keys of `plan --json` for a small GearHead."""
    return _keys_printed_by("plan", "--json", f"simulate={SIMULATED}", *SMALL_MODEL, "data.batch_size=2")


def watch_lines() -> list[str]:
    """Return the keys of `watch --json` with one run."""
    from lightning_unified.cli.watch.snapshot import Observer
    from lightning_unified.hardware import Sources
    from tests.hardware.test_watch import record as run_record

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.json").write_text(json.dumps(run_record().as_json()), encoding="utf-8")
        return key_lines(Observer(Sources.without_torch(), directory=Path(folder)).look(0.0).as_json())


def _keys_printed_by(*command: str) -> list[str]:
    from lightning_unified.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(list(command))
    assert code == 0, printed.getvalue()
    return key_lines(json.loads(printed.getvalue()))


def summary_lines() -> list[str]:
    """Return the keys of `summary.json` of a small run of GearHead in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, ROOT / "train.py", *SMALL_RUN, f"run_dir={folder}/run"],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        return key_lines(json.loads(Path(folder, "run", "summary.json").read_text()))
