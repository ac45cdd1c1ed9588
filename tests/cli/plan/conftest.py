"""The `plan` command beside a planner that notes its calls."""

from types import SimpleNamespace

import pytest

from lightning_unified.cli.plan.command import main
from tests.cli.conftest import CONF
from tests.support.planner_calls import Calls


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def command(calls, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capfd.readouterr()
        with calls.in_place():
            code = main(list(arguments), config_path=CONF)
        return SimpleNamespace(code=code, **capfd.readouterr()._asdict())

    return run
