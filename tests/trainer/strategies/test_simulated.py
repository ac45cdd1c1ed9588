"""`UnifiedStrategy(simulate=…)`: the CPU trains, and memory is another machine's."""

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules
from lightning_unified.callbacks import MemoryMonitor, MemoryProgressBar, PressureGuard
from lightning_unified.callbacks.device_pool import simulated_pressure
from lightning_unified.errors import BudgetError, ConfigurationError, HardwareError, OutOfMemoryError, PrecisionError
from lightning_unified.strategies import UnifiedStrategy
from tests.support.lanes import first_cells, slow

MIB, GIB = 2**20, 2**30


class Deep(L.LightningModule):
    """1 MiB of activations in 32 tensors a row.

    On Metal these open no heap of a gibibyte.
    """

    def __init__(self):
        super().__init__()
        self.lift, self.drop = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)
        self.fails = False

    def training_step(self, batch, batch_idx):
        hidden = self.lift(batch)
        for _ in range(31):
            hidden = hidden.tanh()
        if self.fails:
            raise ValueError("of the module's own")
        return (self.drop(hidden) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(strategy, *, module=None, callbacks=(), logger=False, **options):
    torch.manual_seed(0)
    module = module or Deep()
    torch.manual_seed(1)
    rows = torch.randn(128, 64, 32)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        **({"max_steps": 2} | options),
        callbacks=list(callbacks),
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=any(isinstance(callback, MemoryProgressBar) for callback in callbacks),
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=64))
    return module


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.fixture(scope="module")
def undivided():
    return weights(fit("auto"))


@first_cells(
    1,
    ("machine", "version", "budget", "words"),
    [
        slow("m2-16gb", "2.13.0", "48MiB", "RuntimeError: MPS backend out of memory (MPS allocated: "),
        ("m2-16gb", "2.14.1", "48MiB", "RuntimeError: MPS backend out of memory (MPS allocated: "),
        ("rtx3060-12gb", None, "40MiB", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB."),
        slow("rx6750xt-12gb", None, "40MiB", "OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB."),
        slow("gb10-128gb", None, "40MiB", "OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_a_batch_that_does_not_fit_is_split_and_trains_the_same(
    machine, version, budget, words, undivided, caplog, monkeypatch
):
    if version is not None:
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    strategy = UnifiedStrategy(simulate=machine, budget=budget, predict=False)
    with caplog.at_level("WARNING", logger="lightning_unified"):
        module = fit(strategy)

    assert strategy.recoveries >= 1
    assert strategy.micro_batch_size < 64
    assert torch.allclose(weights(module), undivided, atol=1e-6)
    assert f"simulated {machine}: {words}" in caplog.text
    assert strategy.simulated.allocator.peak <= strategy.budget.bytes


def test_a_batch_that_fits_is_not_split_and_trains_bit_for_bit_the_same(undivided):
    strategy = UnifiedStrategy(simulate="m2-16gb")
    module = fit(strategy)

    assert (strategy.recoveries, strategy.micro_batch_size) == (0, 64)
    assert torch.equal(weights(module), undivided)


def test_without_recovery_the_backends_own_error_comes_through():
    with pytest.raises(torch.OutOfMemoryError, match=r"HIP out of memory\. Tried to allocate"):
        fit(UnifiedStrategy(simulate="rx6750xt-12gb", budget="40MiB", predict=False, recover=False))


def test_what_does_not_fit_in_any_size_says_on_which_machine():
    class Whole(Deep):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(unit=64)

    with pytest.raises(OutOfMemoryError, match=r"simulated rtx3060-12gb: OutOfMemoryError: CUDA out of memory"):
        fit(UnifiedStrategy(simulate="rtx3060-12gb", budget="40MiB", predict=False), module=Whole())


def test_weights_that_the_budget_does_not_hold_are_refused_before_the_first_step():
    class Wide(Deep):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Linear(512, 512)

    strategy = UnifiedStrategy(simulate="m2-16gb", budget="1MiB")
    with pytest.raises(BudgetError, match=r"a budget of 1\.00 MiB \(1MiB\) cannot hold Wide"):
        fit(strategy, module=Wide())


def test_a_budget_below_one_embeddings_heap_is_refused_before_the_first_step():
    class Wide(Deep):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Embedding(3000, 1000)

    strategy = UnifiedStrategy(simulate="m1-8gb", budget="400MiB")
    with pytest.raises(BudgetError, match=r"Metal keeps its weights of 11\.\d+ MiB in heaps of 1\.01 GiB together"):
        fit(strategy, module=Wide())


def test_the_plan_and_the_peak_say_that_they_are_simulated():
    strategy = UnifiedStrategy(simulate="h200", budget="50%")
    fit(strategy)
    reasons = strategy.plan.reasons

    assert strategy.budget.bytes == strategy.simulated.profile.total // 2
    assert "simulated h200: props.total_memory" in reasons["budget"]
    assert reasons["cap"].startswith("simulated h200: ")
    assert strategy.measured_peak().source == "simulated h200: torch.cuda.max_memory_allocated"
    assert 60 * MIB < strategy.measured_peak().bytes < 80 * MIB
    assert strategy.reading().name == "NVIDIA H200 (simulated h200)"
    assert strategy.told_device == "cuda (simulated h200 on cpu)"


def test_the_device_is_given_up_after_the_fit_and_the_peak_stays():
    strategy = UnifiedStrategy(simulate="h200")
    fit(strategy)
    before = strategy.reading().allocated.bytes
    torch.randn(1000)

    assert (before, strategy.reading().allocated.bytes) == (0, 0)
    assert strategy.simulated.allocator.peak > 60 * MIB
    assert _get_current_dispatch_mode_stack() == []


def test_an_error_in_the_fit_leaves_nothing_active():
    module = Deep()
    module.fails = True
    strategy = UnifiedStrategy(simulate="m2-16gb")
    with pytest.raises(ValueError, match="of the module's own"):
        fit(strategy, module=module)

    assert _get_current_dispatch_mode_stack() == []
    assert torch.backends.cuda.flash_sdp_enabled()
    assert strategy.reading().allocated.bytes == 0


@first_cells(
    2,
    ("machine", "asked", "runs", "why"),
    [
        ("m2-16gb", "auto", "bf16-mixed", "emulated on this chip"),
        ("rtx3060-12gb", "auto", "bf16-mixed", "natively"),
        ("rx6750xt-12gb", "auto", "32-true", "only emulates"),
        ("m2-16gb", "16-mixed", "bf16-mixed", "because a CPU has no gradient scaler"),
        ("m2-16gb", "32-true", "32-true", "computed by this CPU"),
    ],
)
def test_the_precision_is_the_machines_as_far_as_a_cpu_can_run_it(machine, asked, runs, why):
    strategy = UnifiedStrategy(simulate=machine, precision=asked)
    fit(strategy)

    assert strategy.plan.precision == runs
    assert why in strategy.plan.reasons["precision"]


def test_a_precision_the_machine_has_not_is_refused():
    with pytest.raises(PrecisionError, match="Metal has no float64"):
        fit(UnifiedStrategy(simulate="m2-16gb", precision="64-true"))


def test_an_accelerator_beside_a_simulated_machine_is_refused():
    strategy = UnifiedStrategy(simulate="m2-16gb")
    with pytest.raises(
        ConfigurationError, match=r'simulate=m2-16gb trains on the CPU and was given cuda:0; pass accelerator="cpu"'
    ):
        strategy.parallel_devices = [torch.device("cuda", 0)]


def test_an_unknown_machine_is_refused_when_the_strategy_is_made():
    with pytest.raises(HardwareError, match="did you mean h200"):
        UnifiedStrategy(simulate="h100")


def test_monitor_and_bar_show_the_simulated_machine_by_name(capsys):
    class Rows(DummyLogger):
        rows = []

        def log_metrics(self, metrics, step=None):
            self.rows.append(metrics)

    monitor, bar = MemoryMonitor(every_n_batches=1), MemoryProgressBar()
    fit(UnifiedStrategy(simulate="h200"), callbacks=[monitor, bar, PressureGuard()], logger=Rows())
    names = {name for row in Rows.rows for name in row if name.startswith("memory")}

    assert "memory_simulated_h200/allocated" in names
    assert all(name.startswith("memory_simulated_h200/") for name in names)
    assert monitor.peak_source == "simulated h200: torch.cuda.max_memory_allocated"
    assert "GiB (simulated h200)" in capsys.readouterr().out


def test_pressure_is_the_simulated_machines_and_says_so():
    machine = UnifiedStrategy(simulate="m2-16gb").simulated
    read = simulated_pressure(machine)
    machine.others = 15 * GIB
    pressure = read()

    assert pressure.level == "warn"
    assert pressure.reasons == ("simulated m2-16gb: kern.memorystatus_vm_pressure_level says warn",)
    assert pressure.available.source.startswith("simulated m2-16gb: ")


def test_validation_runs_on_the_simulated_machine_too():
    class Validated(Deep):
        def validation_step(self, batch, batch_idx):
            self.log("seen", float(self.trainer.strategy.reading().allocated.bytes))

    module, strategy = Validated(), UnifiedStrategy(simulate="h200")
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    [result] = trainer.validate(module, DataLoader(torch.randn(8, 64, 32), batch_size=8), verbose=False)

    assert result["seen"] >= sum(parameter.nbytes for parameter in module.parameters())


def test_a_leave_budget_follows_the_simulated_machines_other_programs(monkeypatch):
    monkeypatch.setattr("lightning_unified.hardware.budget._EVERY_S", 0)

    class Others(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.strategy.simulated.others = 12 * GIB

    strategy = UnifiedStrategy(simulate="m2-16gb", budget="leave 3GiB")
    fit(strategy, callbacks=[Others()], max_epochs=3, max_steps=6)

    assert strategy.budget.bytes < 1.1 * GIB
    assert any(event.startswith("the budget fell from ") and "simulated m2-16gb" in event for event in strategy.events)
