"""`plan` runs without the garbage collector to the end of its process; other commands run with it."""

import gc
import sys

import pytest

from lightning_unified import __main__ as command


@pytest.mark.parametrize(
    ("arguments", "collects"), [(["plan", "model=gearhead"], False), (["train"], True), ([], True)]
)
def test_only_plan_runs_without_the_collector(monkeypatch, arguments, collects):
    seen = []
    monkeypatch.setattr(sys, "argv", ["lightning-unified", *arguments])
    monkeypatch.setattr(command, "main", lambda: seen.append(gc.isenabled()) or 3)
    try:
        assert command.run() == 3
        assert seen == [collects]
    finally:
        gc.enable()
        gc.unfreeze()
