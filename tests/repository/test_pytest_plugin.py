"""The pytest plugin, used as a project that has this package would use it."""

import os
import subprocess
import sys
import tomllib

import pytest

from tests.support import ROOT
from tests.support.programs import run_program

TESTS = """
import lightning as L
import pytest
import torch
from lightning_unified.errors import BudgetError, HardwareError
from torch import nn

MIB = 2**20


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lift, self.drop = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def training_step(self, batch, batch_idx):
        return (self.drop(self.lift(batch).tanh()) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(batch_size, **strategy):
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **strategy,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(2 * batch_size, 64), batch_size=batch_size))


@pytest.mark.parametrize("device", ["rtx3060-12gb", "m2-16gb"])
def test_fits(memory_budget, device):
    with memory_budget("12MiB", device=device) as used:
        fit(256)
    assert 4 * MIB < used.peak_bytes <= used.budget_bytes == 12 * MIB


def test_needs_too_much(memory_budget):
    with memory_budget("12MiB", device="rtx3060-12gb"):
        fit(4096)


def test_plain_module_needs_too_much(memory_budget):
    net, x = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()), torch.randn(1024, 1024)
    with memory_budget("12MiB", device="rtx3060-12gb"):
        net(x).sum().backward()


def test_plain_module_fits(memory_budget):
    net, x = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()), torch.randn(1024, 1024)
    with memory_budget("60%", device="rtx3060-12gb", holding=[net, x]) as used, torch.no_grad():
        assert used.bytes == 8 * MIB
        net(x)
    assert used.peak_bytes == 16 * MIB


def test_its_own_error(memory_budget):
    with memory_budget("1MiB", device="rtx3060-12gb"):
        torch.zeros(MIB)
        raise ValueError("of the test's own")


def test_a_recovering_strategy_fits(memory_budget):
    with memory_budget("300MiB", device="rtx3060-12gb"):
        fit(4096, strategy="unified")


def test_what_cannot_be(memory_budget):
    with pytest.raises(BudgetError, match=r"a budget of 40.00 GiB is above the pool of cuda:0, 11.63 GiB \\\\(simulated rtx3060-12gb"):
        with memory_budget("40GiB", device="rtx3060-12gb"):
            pass
    with pytest.raises(HardwareError, match="did you mean m2-16gb"):
        with memory_budget("4GiB", device="m2-16"):
            pass
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_memory.py").write_text(TESTS.replace("\\\\", "\\"))
    options = ["-p", "pytest_lightning_unified", "-rA", "-q", "-W", "ignore", "."]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    return run_program("pytest", *options, cwd=folder, environment=environ).stdout


def reason(outcome, test):
    """Return what a failing test's section says."""
    return outcome.partition(f"_ {test} _")[2].partition("\n____")[0]


def test_a_block_within_its_budget_passes_and_gives_its_peak(outcome):
    for test in (
        "test_fits[rtx3060-12gb]",
        "test_fits[m2-16gb]",
        "test_plain_module_fits",
        "test_a_recovering_strategy_fits",
    ):
        assert f"PASSED test_memory.py::{test}\n" in outcome, outcome


def test_a_block_above_its_budget_fails_with_peak_budget_and_place(outcome):
    text = reason(outcome, "test_needs_too_much")

    assert "FAILED test_memory.py::test_needs_too_much" in outcome
    assert "MiB on a simulated rtx3060-12gb, which is" in text
    assert "above its budget of 12.00 MiB (12MiB)." in text
    assert "The peak was in aten." in text
    assert "test_memory.py:" in text


def test_the_peak_of_a_plain_backward_names_the_operation_and_the_line(outcome):
    text = reason(outcome, "test_plain_module_needs_too_much")

    # MiB: weight 4, input 4, what relu keeps 4, the gradient behind it 4, then the weight's own in the place of what relu kept
    assert "needs 16.01 MiB on a simulated rtx3060-12gb, which is 4.01 MiB above its budget" in text
    assert "in the backward of" in text
    assert "(test_plain_module_needs_too_much)" in text


def test_an_error_of_the_block_is_not_hidden(outcome):
    assert "ValueError: of the test's own" in reason(outcome, "test_its_own_error")


def test_a_budget_or_a_device_that_cannot_be_is_refused(outcome):
    assert "PASSED test_memory.py::test_what_cannot_be" in outcome


def test_loading_the_plugin_registers_no_strategy_and_imports_no_torch():
    plugin = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    code = f"import sys, {plugin['lightning_unified']}; print({{name.partition('.')[0] for name in sys.modules}}, len(sys.meta_path))"
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print(len(sys.meta_path))"], capture_output=True, text=True, check=True
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, _, finders = done.stdout.rpartition(" ")

    assert not {"torch", "lightning", "lightning_unified"} & eval(loaded)
    assert finders == plain.stdout  # the hook that registers the strategies is one more
