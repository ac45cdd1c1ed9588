"""`Trainer(strategy="unified")` as a user meets it: any module, one line, a budget."""

import importlib
import re
import subprocess
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_unified import MicroBatchRules, UnifiedStrategy, _registration
from lightning_unified.errors import BudgetError, ConfigurationError
from lightning_unified.hardware import Figure
from lightning_unified.step.recovery.oom import release_cached_memory
from lightning_unified.step.split import BatchShape

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def lightning_strategies(monkeypatch):
    """The names of Lightning's strategies, imported anew during the test, without ours."""
    name = "lightning.pytorch.strategies"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("lightning.pytorch.strategies", sys)  # restored afterwards; the import sets it
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return name


def test_the_names_are_registered_after_lightnings_import(lightning_strategies):
    imported = importlib.import_module(lightning_strategies)
    before = set(imported.StrategyRegistry)
    _registration.register()

    assert "unified" not in before
    assert {"unified", "unified_ddp", "unified_ddp_spawn", "unified_fsdp_shards"} <= set(imported.StrategyRegistry)


def test_the_names_are_registered_before_lightnings_import(lightning_strategies):
    finders = list(sys.meta_path)
    _registration.register()
    imported = importlib.import_module(lightning_strategies)

    assert {"unified", "unified_ddp", "unified_ddp_spawn", "unified_fsdp_shards"} <= set(imported.StrategyRegistry)
    assert sys.meta_path == finders


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", ["import lightning as L, lightning_unified", "import lightning_unified, lightning as L"]
)
def test_the_name_is_registered_in_either_import_order(order):
    result = python(
        f"{order}\nprint(type(L.Trainer(strategy='unified', accelerator='cpu', logger=False).strategy).__name__)"
    )

    assert result.stdout.strip() == "UnifiedStrategy", result.stderr


def test_importing_the_package_imports_neither_torch_nor_lightning():
    result = python("import sys, lightning_unified\nprint(sorted({'torch', 'lightning'} & set(sys.modules)))")

    assert result.stdout.strip() == "[]", result.stderr


class PlainCNN(L.LightningModule):
    """A third-party module that knows nothing of this package.

    It has BatchNorm, and logs torchmetrics in training and validation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(64, 3),
        )
        self.train_accuracy, self.val_accuracy = MulticlassAccuracy(3), MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train/accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_accuracy(self.net(x), y)
        self.log("val/accuracy", self.val_accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def images(rows: int = 48):
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(3, (rows,), generator=generator)
    x = torch.randn(rows, 1, 8, 8, generator=generator) + y[:, None, None, None]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)


def test_a_third_party_cnn_with_batch_norm_trains_as_under_plain_lightning():
    results = []
    for strategy in ("auto", "unified"):
        torch.manual_seed(0)
        module = PlainCNN()
        trainer = L.Trainer(strategy=strategy, max_epochs=3, **QUIET)
        trainer.fit(module, images(), images())
        results.append((trainer.callback_metrics, module.state_dict()))

    assert {name: float(value) for name, value in results[0][0].items()} == {
        name: float(value) for name, value in results[1][0].items()
    }
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_lightnings_boring_model_runs_every_stage():
    trainer = L.Trainer(strategy="unified", max_steps=3, **QUIET)
    module = BoringModel()
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)

    assert trainer.global_step == 3
    assert len(trainer.predict(module)) == 64


def test_manual_optimization_passes_through():
    trainer = L.Trainer(strategy="unified", max_steps=3, **QUIET)
    trainer.fit(ManualOptimBoringModel())

    assert trainer.global_step == 3


def test_a_training_step_that_draws_its_own_batches_passes_through():
    class Draws(BoringModel):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.step(batch)

    trainer = L.Trainer(strategy="unified", max_steps=3, **QUIET)
    trainer.fit(Draws())

    assert trainer.global_step == 3


def test_a_skipped_step_is_skipped(monkeypatch):
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())  # warns once in a process

    class Skips(BoringModel):
        def training_step(self, batch, batch_idx):
            return None

    module = Skips()
    before = module.layer.weight.detach().clone()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        L.Trainer(strategy="unified", max_steps=2, **QUIET).fit(module)

    assert torch.equal(module.layer.weight, before)


def test_a_budget_that_cannot_hold_the_weights_is_refused_before_training():
    with pytest.raises(BudgetError, match=r"cannot hold Large: weights 64\.00 MiB .* before any activation"):
        L.Trainer(strategy=UnifiedStrategy(budget="100MiB"), max_steps=1, **QUIET).fit(large())
    L.Trainer(strategy=UnifiedStrategy(budget="2GiB"), max_steps=1, **QUIET).fit(BoringModel())


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, {"predict": False}], ids=str)
def test_a_cpu_budget_below_the_process_is_refused_with_one_that_works(options):
    with pytest.raises(BudgetError, match=r"counts the whole process, and this process holds \d") as refused:
        L.Trainer(strategy=UnifiedStrategy(budget="50MiB", **options), max_steps=1, **QUIET).fit(BoringModel())
    assert len(str(refused.value).splitlines()) == 1
    assert not re.search(r"-\d", str(refused.value))

    strategy = UnifiedStrategy(budget=re.search(r"Give (\d+MiB)", str(refused.value))[1], **options)
    L.Trainer(strategy=strategy, max_steps=1, **QUIET).fit(BoringModel())
    assert not [event for event in strategy.events if "above the budget" in event]


def test_an_automatic_budget_and_an_evaluation_are_not_refused_for_a_large_process():
    L.Trainer(strategy=UnifiedStrategy(budget="auto"), max_steps=1, **QUIET).fit(BoringModel())
    L.Trainer(strategy=UnifiedStrategy(budget="50MiB"), **QUIET).validate(BoringModel())


def large() -> L.LightningModule:
    class Large(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4096, 4096, bias=False)

    return Large()


def test_a_budget_above_the_pool_is_refused():
    with pytest.raises(BudgetError, match=r"above the pool of cpu.*the largest tier that fits"):
        L.Trainer(strategy=UnifiedStrategy(budget="900000GiB"), max_steps=1, **QUIET).fit(BoringModel())


def resident_bytes():
    """Return the memory of this process without what earlier tests left behind, which the fit would free."""
    release_cached_memory(torch.device("cpu"))
    return UnifiedStrategy().reading().allocated.bytes


def test_a_process_that_outgrows_its_budget_on_a_cpu_runs_smaller_micro_batches():
    class Hungry(BoringModel):
        def training_step(self, batch, batch_idx):
            ballast = torch.ones(len(batch), 2**22)  # 16 MiB a row
            return super().training_step(batch, batch_idx)["loss"] + 0 * ballast.sum()

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=16)

    resident = resident_bytes()
    strategy = UnifiedStrategy(budget=resident + 75 * 2**20)
    trainer = L.Trainer(strategy=strategy, max_steps=4, **QUIET)
    trainer.fit(Hungry())

    assert strategy.effective_batch_size == 16
    assert strategy.micro_batch_size < 16
    assert "above the budget" in strategy.events[0]
    assert strategy.measured_peak().bytes > resident


def test_a_short_last_batch_is_not_taken_for_the_size_in_use(monkeypatch):
    """Nine rows in batches of eight.

    Micro-batches of four rows exceeded the budget, not the last batch's single row.
    """
    strategy = UnifiedStrategy(micro_batch_size=4)
    trainer = L.Trainer(strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.randn(9, 32), batch_size=8))
    assert strategy.micro_batch_size == 4
    monkeypatch.setattr("lightning_unified.step.recovery.budget_watch.read_peak", lambda _: Figure(2**60, "made up"))
    strategy.policy.batch_done(BatchShape(8, 32))

    assert strategy.micro_batch_size == 2
    assert "micro-batches of 2 rows from here on" in strategy.events[-1]


def test_a_module_that_cannot_be_split_exceeds_its_budget_and_reports_it(monkeypatch):
    class Whole(BoringModel):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(splittable=False)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=16)

    # this process's own peak depends on the tests before
    monkeypatch.setattr("lightning_unified.step.recovery.budget_watch.read_peak", lambda _: Figure(2**60, "made up"))
    strategy = UnifiedStrategy(budget="2GiB")
    trainer = L.Trainer(strategy=strategy, max_steps=4, **QUIET)
    trainer.fit(Whole())

    assert (trainer.global_step, strategy.micro_batch_size) == (4, 16)
    assert len(strategy.events) == 1
    assert "cannot be split exactly" in strategy.events[0]


def test_shrinking_on_request_halves_the_size_in_use_and_says_why():
    strategy = UnifiedStrategy(micro_batch_size=4)
    assert not strategy.shrink("asked too early")
    L.Trainer(strategy=strategy, max_steps=2, **QUIET).fit(
        BoringModel(), torch.utils.data.DataLoader(torch.randn(16, 32), batch_size=8)
    )
    shrunk = [strategy.shrink("somebody needs memory") for _ in range(3)]

    assert shrunk == [True, True, False]
    assert (strategy.effective_batch_size, strategy.micro_batch_size) == (8, 1)
    assert strategy.events == [
        "asked too early; no batch that can be split has run yet",
        "somebody needs memory; micro-batches of 2 rows from here on",
        "somebody needs memory; micro-batches of 1 row from here on",
        "somebody needs memory; nothing left to shrink",
    ]
    assert strategy.plan.reasons["micro_batch_size"] == "as asked, then smaller: somebody needs memory"


def test_two_devices_are_refused_with_what_to_write():
    with pytest.raises(ConfigurationError, match='pass devices=1, or strategy="unified_ddp" to train on all of them'):
        L.Trainer(strategy="unified", devices=2, **QUIET)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0: give a number of rows"),
        ({"micro_batch_size": "many"}, "micro_batch_size='many'"),
        ({"recompute": "yes"}, "recompute='yes'"),
        ({"batch_norm": "ignore"}, "batch_norm='ignore'"),
    ],
)
def test_bad_arguments_say_what_is_allowed(options, text):
    with pytest.raises(ConfigurationError, match=text):
        UnifiedStrategy(**options)


def test_the_plan_states_the_choice_and_the_reason():
    trainer = L.Trainer(strategy=UnifiedStrategy(micro_batch_size=4, budget="60%"), max_steps=2, **QUIET)
    trainer.fit(BoringModel())
    plan = trainer.strategy.plan.to_dict()

    assert plan["precision"] == "32-true"
    assert plan["budget_bytes"] == trainer.strategy.budget.bytes
    assert plan["reasons"]["micro_batch_size"] == "as asked"
    assert trainer.strategy.effective_batch_size == 1 and plan["micro_batch_size"] == 1


@pytest.mark.parametrize(("asked", "is_said"), [(9, True), (8, False), (4, False), ("auto", False)])
def test_a_micro_batch_size_above_the_batch_is_said_once(asked, is_said, caplog):
    class Rows(BoringModel):
        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(24, 32), batch_size=8)

    with caplog.at_level("WARNING", logger="lightning_unified"):
        L.Trainer(strategy=UnifiedStrategy(micro_batch_size=asked), max_steps=3, **QUIET).fit(Rows())

    assert caplog.text.count("micro_batch_size=9 exceeds the batch of 8 rows") == is_said
    assert ("exceeds" in caplog.text) == is_said
