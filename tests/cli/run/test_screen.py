"""At its start a run reports how it uses the machine: the real values, not the settings."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import precision
from omegaconf import OmegaConf
from rich.console import Console

from lightning_unified.cli.run.machine import Machine
from lightning_unified.cli.run.screen import show_note, show_start
from lightning_unified.hardware import HardwareSettings, read, resolve_budget
from lightning_unified.hardware.loader_workers import LoaderWorkers
from lightning_unified.precision import MixedPrecision
from lightning_unified.terminal import labelled


def shown(capsys, *, plugin, data, given=()):
    reading = read("cpu")
    workers = LoaderWorkers(count=2, reason="two share 16.00 GiB with the model")
    machine = Machine(reading=reading, settings=HardwareSettings(), workers=workers)
    strategy = SimpleNamespace(root_device=torch.device("mps"), budget=resolve_budget("1GiB", reading))
    module = torch.nn.Linear(2, 3)
    module.trainer = SimpleNamespace(strategy=strategy, world_size=1, precision_plugin=plugin)
    config = {"name": "net", "seed": 3, "run_dir": f"/elsewhere/{'runs/' * 12}net", "data": data}
    show_start(OmegaConf.create(config), machine, module=module, given=given)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10
    return dict(line.split(maxsplit=1) for line in lines if line[0] != " ")


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (
            MixedPrecision("16-mixed", device_type="cpu", scaler=torch.amp.GradScaler("cpu")),
            "16-mixed, gradient scaler on",
        ),
        (
            precision.MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", enabled=False)),
            "16-mixed",
        ),
        (precision.Precision(), "32-true"),
    ],
)
def test_a_gradient_scaler_is_said_to_be_on_only_where_it_scales(capsys, plugin, said):
    assert shown(capsys, plugin=plugin, data={"batch_size": 16})["model"] == f"Linear, 9 parameters, {said}"


def test_rows_loader_processes_and_pinning_are_those_of_the_data(capsys):
    data = {"batch_size": 64, "val_batch_size": None, "num_workers": 4, "start_method": "spawn", "pin_memory": False}
    lines = shown(capsys, plugin=precision.Precision(), data=data)

    assert lines["batch"] == "64 rows for the optimizer, 64 to validate"
    assert lines["loading"] == "4 worker processes, by spawn, pin memory off"
    assert lines["budget"].startswith("1.00 GiB (1GiB): as written, of the pool of cpu")
    assert lines["device"].startswith(f"mps ({read('cpu').name}), ")
    assert lines["run"].startswith("net, seed 3, all settings in")


def test_the_number_of_loader_processes_comes_with_its_reason(capsys):
    data = {"batch_size": 64, "num_workers": 2, "start_method": "spawn", "pin_memory": False}
    said = shown(capsys, plugin=precision.Precision(), data=data)["loading"]

    assert said.startswith("2 worker processes, by spawn, pin memory off (two share 16.00 GiB")


def test_the_start_is_short_with_many_overrides_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr("lightning_unified.cli.run.screen._CONSOLE", Console(soft_wrap=True, width=60, highlight=False))
    given = [f"model.key_{number}={number}" for number in range(30)]
    lines = shown(capsys, plugin=precision.Precision(), data={"batch_size": 8}, given=given)

    assert lines["given"].startswith("model.key_0=0 model.key_1=1") and lines["given"].endswith("…")
    assert len(lines["given"]) <= 51


def test_runs_that_share_a_terminal_print_lines_with_their_names(capsys):
    with labelled("seed=3"):
        show_note("one")
    assert capsys.readouterr().out == "[seed=3] one\n"
