"""`UnifiedStrategy(predict=True)` traces the step before the first batch runs.

Memory does not run out in that batch.
"""

import json
import weakref

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules
from lightning_unified.cost_model.generation import Generation
from lightning_unified.cost_model.rates import typical_rates
from lightning_unified.cost_model.rates.calibration import Calibration, calibrated_machines
from lightning_unified.errors import BudgetError
from lightning_unified.hardware import Figure, Reading
from lightning_unified.planner import other_phases
from lightning_unified.planner.first_batch.planning import StepPlanning
from lightning_unified.planner.search.planner import Planner
from lightning_unified.step.exactness.trials.examination import Examination
from lightning_unified.step.recovery import budget_watch
from lightning_unified.strategies import UnifiedStrategy
from tests.support.lanes import first_cells, slow, some
from tests.trainer.strategies.predicting.deep import MIB, Deep, fit, weights


class ByValue(Deep):
    """How much it computes hangs on values that no dry run has."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[batch.sum((1, 2)) > -1e9], batch_idx)


@pytest.mark.parametrize("machine", some(["rtx3060-12gb", "gb10-128gb"], "rtx3060-12gb"))
def test_a_batch_that_does_not_fit_never_runs_out_of_memory(machine, undivided):
    strategy = UnifiedStrategy(simulate=machine, budget="16MiB")
    module = fit(strategy)

    assert strategy.recoveries == 0
    assert strategy.micro_batch_size < 32 or strategy.plan.recompute
    if strategy.micro_batch_size < 32:
        assert strategy.plan.reasons["micro_batch_size"].startswith("as planned")
    assert strategy.simulated.allocator.peak_reserved <= 16 * MIB
    assert torch.allclose(weights(module), undivided, atol=1e-6)


@pytest.mark.slow
def test_what_metal_holds_beside_the_heaps_is_left_out_of_what_a_plan_may_take(undivided):
    strategy = UnifiedStrategy(simulate="m2-16gb", budget="40MiB", recompute=False)
    module = fit(strategy)

    assert strategy.policy.watch.driver_bytes == strategy.simulated.profile.context > 0
    assert strategy.plan.prediction.reserved_bytes < 40 * MIB  # five heaps of 8 MiB, which are 40, would not go through
    assert strategy.recoveries == 0
    assert torch.allclose(weights(module), undivided, atol=1e-6)


class Heavy(Deep):
    """Has 4 MiB of weights, and few activations."""

    def __init__(self):
        super().__init__(depth=0)
        self.blocks.append(torch.nn.Sequential(torch.nn.Linear(64, 8192), torch.nn.Linear(8192, 64)))


@pytest.mark.parametrize("rolls_back", [False, True])
def test_copies_of_the_weights_around_the_optimizers_step_are_planned(rolls_back):
    strategy = UnifiedStrategy(simulate="h200", budget="40MiB", optimizer_rollback=rolls_back)
    fit(strategy, kind=Heavy, lengths=(8,) * 3, rows=1)
    predicted = strategy.plan.predicted_peak_bytes

    assert predicted == pytest.approx(strategy.measured_peak().bytes, rel=0.02)
    assert (predicted > 18 * MIB) == rolls_back  # weights, gradients and momentum are 12 MiB, the copies 8


def test_the_copy_of_an_asynchronous_save_is_left_out_of_what_a_plan_may_take(tmp_path):
    peaks = []
    for plugins in ([], [AsyncCheckpointIO()]):
        strategy = UnifiedStrategy(simulate="h200", budget="40MiB")
        saves = {"enable_checkpointing": True, "default_root_dir": tmp_path, "plugins": plugins}
        fit(strategy, kind=Heavy, lengths=(8,) * 2, rows=1, **saves)
        peaks.append(strategy.plan.predicted_peak_bytes)

    assert peaks[1] - peaks[0] == pytest.approx(8 * MIB, rel=0.01)  # weights and momentum


def test_a_plan_does_not_keep_the_batch_it_was_made_for():
    batches, alive = [], []

    class Watches(Deep):
        def training_step(self, batch, batch_idx):
            if not isinstance(batch, torch._subclasses.FakeTensor):
                alive.append([one() is not None for one in batches])
                batches.append(weakref.ref(batch))
            return super().training_step(batch, batch_idx)

    fit(UnifiedStrategy(simulate="h200", budget="64MiB"), kind=Watches, lengths=(128,) * 3)

    assert alive == [[], [False], [False, False]]


@first_cells(
    1,
    ("machine", "version"),
    [
        ("h200", "2.13.0"),
        slow("rtx3060-12gb", "2.13.0"),
        slow("m2-16gb", "2.13.0"),
        ("m1-8gb", "2.13.0"),
        ("m1-8gb", "2.14.1"),
    ],
)
def test_the_predicted_peak_is_the_one_that_is_measured(machine, version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    strategy = UnifiedStrategy(simulate=machine, budget="40MiB")
    fit(strategy)

    assert strategy.plan.predicted_peak_bytes == pytest.approx(strategy.measured_peak().bytes, rel=0.001)


def test_a_batch_that_fits_runs_whole_and_bit_for_bit_the_same(undivided):
    strategy = UnifiedStrategy(simulate="h200", budget="64MiB")
    module = fit(strategy)

    assert strategy.micro_batch_size == 32
    assert strategy.plan.prediction.rows == 32
    assert torch.equal(weights(module), undivided)


def test_what_planning_takes_of_a_cpus_pool_is_not_given_to_the_step_as_well(monkeypatch):
    taken, choose = [0], Planner.choose

    def reading(_device):
        figures = {name: Figure(count, name) for name, count in (("total", 8192 * MIB), ("available", 4096 * MIB))}
        held = Figure(100 * MIB + sum(taken), "held")
        return Reading(
            device="cpu", backend="cpu", name="", pool="unified", **figures, allocated=held, reserved=held, peak=held
        )

    def choosing(self, *args, **named):
        taken.append(8 * MIB if len(taken) == 1 else 0)
        return choose(self, *args, **named)

    monkeypatch.setattr(budget_watch, "read", reading)
    monkeypatch.setattr(budget_watch, "read_peak", lambda _: Figure(MIB, "made up"))
    monkeypatch.setattr(budget_watch, "resident_files", lambda _: 0)
    monkeypatch.setattr(Planner, "choose", choosing)
    monkeypatch.setattr(Calibration, "speeds", lambda _self, _device: typical_rates("cpu"))
    strategy = UnifiedStrategy(budget=112 * MIB, recompute=False)
    fit(strategy, lengths=(128,))

    assert len(taken) == 3  # it was chosen again
    assert strategy.plan.predicted_peak_bytes <= 112 * MIB
    assert strategy.plan.predicted_peak_bytes - strategy.plan.prediction.reserved_bytes > 106 * MIB


def test_a_run_that_never_fits_is_refused_with_sizes_that_would():
    class Whole(Deep):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(splittable=False)

    strategy = UnifiedStrategy(simulate="h200", budget="6MiB")
    with pytest.raises(
        BudgetError,
        match=r"(?s)no plan fits: .*6\.00 MiB .*What would fit:\n  .*the whole batch of 32 rows at once.*"
        r"\nThe batch runs whole, because the rules of Whole say splittable=False",
    ) as refused:
        fit(strategy, kind=Whole)

    lines = str(refused.value).splitlines()
    assert len(lines) == len(set(lines))


def test_without_a_reliable_dry_run_rows_are_probed_on_the_device_and_it_is_said(undivided, caplog):
    strategy = UnifiedStrategy(simulate="h200", budget="16MiB")
    with caplog.at_level("WARNING", logger="lightning_unified"):
        module = fit(strategy, kind=ByValue)

    assert strategy.plan.prediction is None
    assert "1, 2, 4, 8, 16 rows were run on the device and undone" in caplog.text
    assert strategy.recoveries == 0
    assert 4 < strategy.micro_batch_size < 32
    assert torch.allclose(weights(module), undivided, atol=1e-6)


def test_a_probe_leaves_the_run_as_it_found_it():
    probed = UnifiedStrategy(simulate="h200", budget="64MiB")
    unprobed = UnifiedStrategy(simulate="h200", budget="64MiB", predict=False)

    assert torch.equal(weights(fit(probed, kind=ByValue)), weights(fit(unprobed, kind=ByValue)))
    assert (probed.micro_batch_size, unprobed.micro_batch_size) == (32, 32)


def test_a_step_that_cannot_run_on_fewer_rows_is_not_probed_and_runs(caplog):
    class Picky(ByValue):
        def training_step(self, batch, batch_idx):
            if len(batch) != 32:
                raise ValueError("32 rows or none")
            return super().training_step(batch, batch_idx)

    strategy = UnifiedStrategy(simulate="h200", budget="64MiB")
    with caplog.at_level("WARNING", logger="lightning_unified"):
        fit(strategy, kind=Picky)

    assert "and it did not run on fewer rows: ValueError: 32 rows or none); sizes are found by trying" in caplog.text
    assert strategy.micro_batch_size == 32


def test_a_planner_that_fails_does_not_end_the_run(monkeypatch, caplog):
    def failing(*_, **__):
        raise KeyError("of the planner's own")

    monkeypatch.setattr("lightning_unified.planner.search.step_traces.DryRuns", failing)
    strategy = UnifiedStrategy(simulate="h200", budget="16MiB")
    with caplog.at_level("WARNING", logger="lightning_unified"):
        fit(strategy)

    assert 'KeyError: "of the planner\'s own"' in caplog.text
    assert strategy.micro_batch_size < 32


def test_nothing_is_traced_where_nothing_can_be_gained():
    strategy = UnifiedStrategy(simulate="h200")
    fit(strategy, rows=2, lengths=(4,))

    assert strategy.plan.prediction is None
    assert strategy.plan.reasons["prediction"].startswith("not worth it")


def test_it_can_be_switched_off():
    strategy = UnifiedStrategy(simulate="h200", budget="16MiB", predict=False)
    fit(strategy)

    assert strategy.plan.prediction is None
    assert strategy.recoveries > 0


@pytest.mark.slow
def test_the_plan_is_plain_values_for_its_file():
    strategy = UnifiedStrategy(simulate="h200", budget="16MiB")
    fit(strategy)
    content = json.loads(json.dumps(strategy.plan.to_dict()))

    assert content["prediction"]["peak_bytes"] > 0
    assert content["prediction"]["categories"]["weights"] > 0
    assert content["prediction"]["parts"] == strategy.plan.prediction.num_micro_batches
    assert content["reasons"]["prediction"]


@pytest.mark.slow
def test_measured_speeds_are_saved_for_the_machines_next_runs():
    strategy = UnifiedStrategy(budget="2GiB")
    fit(strategy, rows=256, lengths=(128,) * 4)
    machines = calibrated_machines()

    assert len(machines) == 1
    assert list(Calibration.load(machines[0]).peaks) == ["cpu 32-true"]


@pytest.mark.slow
def test_the_memory_of_an_exactness_check_teaches_nothing_about_steps(monkeypatch):
    ran, findings = [], Examination.findings

    def large(self, check):
        ran.append(torch.ones(2**28))  # 1 GiB
        ran[-1] = None
        return findings(self, check)

    monkeypatch.setattr(Examination, "findings", large)
    strategy = UnifiedStrategy(budget="3GiB", micro_batch_size=16)
    fit(strategy, rows=64, lengths=(128,) * 3)
    (machine,) = calibrated_machines()
    (ratio,) = Calibration.load(machine).peaks["cpu 32-true"]

    assert len(ran) == 2  # before the first and the second batch
    assert ratio < 3  # many times that with the 1 GiB; a CPU's process keeps some freed memory
    assert strategy.measured_peak().bytes > 2**30


@pytest.mark.slow
def test_a_simulated_machine_teaches_nothing_about_this_one():
    fit(UnifiedStrategy(simulate="h200", budget="16MiB"), lengths=(128,) * 4)

    assert calibrated_machines() == []


class Phases(Deep):
    """Batches of one thing first, and then of two."""

    def training_step(self, batch, batch_idx):
        return sum(Deep.training_step(self, rows, batch_idx) for rows in batch.values())


def in_phases(strategy, module=None):
    rows = torch.ones(32, 64, 64)
    batches = [{"x": rows}, {"x": rows}, {"x": rows[:, :48], "y": rows[:, :8]}, {"x": rows}]
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module or Phases(), DataLoader(batches, batch_size=None))
    return strategy


def test_batches_of_another_kind_get_their_own_plan_and_the_first_kind_keeps_its(monkeypatch):
    planned = []
    plan = StepPlanning.plan
    monkeypatch.setattr(
        StepPlanning, "plan", lambda self, batch, shape: (planned.append(sorted(batch)), plan(self, batch, shape))
    )
    first = in_phases(UnifiedStrategy(budget="64MiB", simulate="m2-16gb")).first_step

    assert planned == [["x"], ["x", "y"]]
    assert first.memory.peak_bytes >= first.memory.earlier_peak > 0


def test_what_is_generated_before_a_step_is_part_of_the_predicted_peak(monkeypatch):
    monkeypatch.setattr(other_phases, "generation_before", lambda *_, **__: Generated)

    class Generated:
        rows, prompt, new = 4, 2, 1
        bytes = Generation(weights=MIB, cache=900 * MIB, logits=0, prompt=0)

    strategy = in_phases(UnifiedStrategy(budget="1000MiB", simulate="m2-16gb"))

    assert strategy.first_step.memory.prediction.generation_bytes > 900 * MIB
    assert strategy.first_step.memory.peak_bytes > 900 * MIB
    assert "4 rows of 2 + 1 tokens before the step" in strategy.plan.reasons["generation"]
