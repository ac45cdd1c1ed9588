"""Commands that run inside the test's process, small and in a folder of their own."""

import sys
from typing import NamedTuple

import pytest

from lightning_unified.cli.train import train
from tests.support import ROOT

CONF = str(ROOT / "conf")
TINY = (
    "hardware=cpu",
    "data=builtin",
    "model.width=16",
    "model.heads=2",
    "model.layers=1",
    "model.feed_forward=16",
    "trainer.enable_progress_bar=false",
)


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self):
        return (self.out + self.err).splitlines()


def call(monkeypatch, capfd, *arguments, config_path=CONF):
    """Run `train` as a process of its own would, as far as this one allows."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr("lightning_unified.cli.train._interpreter", lambda: "python")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("lightning_unified.terminal.activities._AFTER_S", 3600.0)  # a busy machine writes no more
    capfd.readouterr()
    code = train(list(arguments), config_path=config_path)
    return Done(code, *capfd.readouterr())


@pytest.fixture
def tiny():
    return TINY


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, **options: call(monkeypatch, capfd, *arguments, **options)
