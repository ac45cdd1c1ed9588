"""At its start a run reports how it uses the machine: the real values, not the settings."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import precision
from omegaconf import OmegaConf

from lightning_unified.cli.run.machine import Machine
from lightning_unified.cli.run.screen import show_start
from lightning_unified.hardware import HardwareSettings, read, resolve_budget
from lightning_unified.precision import MixedPrecision


def shown(capsys, *, plugin, data):
    reading = read("cpu")
    machine = Machine(reading=reading, settings=HardwareSettings())
    strategy = SimpleNamespace(root_device=torch.device("mps"), budget=resolve_budget("1GiB", reading))
    module = torch.nn.Linear(2, 3)
    module.trainer = SimpleNamespace(strategy=strategy, world_size=1, precision_plugin=plugin)
    show_start(OmegaConf.create({"data": data}), machine, module=module)
    return dict(line.strip().split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (
            MixedPrecision("16-mixed", device_type="cpu", scaler=torch.amp.GradScaler("cpu")),
            "16-mixed, gradient scaler on",
        ),
        (
            precision.MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", enabled=False)),
            "16-mixed, gradient scaler none",
        ),
        (precision.Precision(), "32-true, gradient scaler none"),
    ],
)
def test_a_gradient_scaler_is_said_to_be_on_only_where_it_scales(capsys, plugin, said):
    assert shown(capsys, plugin=plugin, data={"batch_size": 16})["precision"] == said


def test_rows_loader_processes_and_pinning_are_those_of_the_data(capsys):
    data = {"batch_size": 64, "val_batch_size": None, "num_workers": 4, "start_method": "spawn", "pin_memory": False}
    lines = shown(capsys, plugin=precision.Precision(), data=data)

    assert lines["batch"] == "64 rows for the optimizer, 64 to validate"
    assert lines["loading"] == "4 worker processes, by spawn, pin memory off"
    assert lines["budget"].startswith("1.00 GiB (1GiB): as written, of the pool of cpu")
    assert lines["runs"].split(maxsplit=1)[1] == "mps, 1 process"
