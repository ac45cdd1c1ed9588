"""A repeated step finds everything as the failed attempt found it.

This covers hooks, batches, metrics, counters, scaler and other callbacks.
"""

import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torchmetrics import CatMetric, MaxMetric, MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score, MulticlassPrecision

from lightning_unified import UnifiedStrategy
from lightning_unified.callbacks import GradientHealth, MemoryMonitor, MemoryProgressBar, RunCheckpoint
from lightning_unified.errors import HalfUpdatedError, OutOfMemoryError, RunError
from tests.step.recovery.test_recovery import TEXT, Fails, Stateful, undisturbed
from tests.support.lanes import crossed, first_cells, slow, some
from tests.support.lasting import Lasting
from tests.support.modules.plain import MLP, weights
from tests.support.runs.recovering import ShrinksAt, run


class FailsIn(L.Callback):
    """Runs out of memory in the given hook of the given batch.

    It does so at its `first` call there, and `times` attempts in a row.
    """

    calls, raised = Lasting(), Lasting()

    def __init__(self, hook: str, batch: int = 4, *, first: int = 1, times: int = 1) -> None:
        self.batch, self.first, self.times = batch, first, times
        self.seen = -1
        setattr(self, hook, self._maybe_fail)

    def on_train_batch_start(self, *_):
        self.seen += 1

    def _maybe_fail(self, *_):
        if self.seen != self.batch:
            return
        self.calls += 1
        if self.calls >= self.first and self.raised < self.times:
            self.raised += 1
            raise RuntimeError(TEXT)


def assert_recovered_as_undisturbed(kind, failing, **options):
    random.seed(0)
    np.random.seed(0)
    module, seen, trainer = run(kind, failing, **options)
    assert trainer.strategy.recoveries == failing.raised >= 1
    size = trainer.strategy.micro_batch_size
    twin, twin_seen, twin_trainer = undisturbed(kind, size, failing.batch, **options)

    assert torch.equal(weights(module), weights(twin))
    assert seen.callback_metrics == twin_seen.callback_metrics
    mine, theirs = trainer.callback_metrics, twin_trainer.callback_metrics
    assert {name: float(value) for name, value in mine.items()} == {
        name: float(value) for name, value in theirs.items()
    }
    assert all(torch.equal(*pair) for pair in zip(module.buffers(), twin.buffers(), strict=True))


def steps(batch: int, window: int) -> bool:
    """Whether the optimizer steps after `batch`, of three in an epoch."""
    return (batch % 3 + 1) % window == 0 or batch % 3 == 2


POSITIONS = [
    (hook, batch, window)
    for hook in ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
    for window in (1, 2, 3)
    for batch in (0, 1, 2, 5)
    if not (hook == "on_before_optimizer_step" and not steps(batch, window))
    if not (hook == "on_before_zero_grad" and batch % 3 % window)
]


EVERY_HOOK = (
    ("on_before_backward", 1, 3),
    ("on_after_backward", 5, 2),
    ("on_before_optimizer_step", 2, 3),
    ("on_before_zero_grad", 0, 2),
)


@first_cells(1, ("hook", "batch", "window"), some(POSITIONS, *EVERY_HOOK[1:3]))
def test_memory_that_runs_out_in_a_hook_at_any_place_of_a_window_leaves_no_trace(hook, batch, window):
    assert_recovered_as_undisturbed(Stateful, FailsIn(hook, batch), window=window, clip=0.3)


class SeesGradients(MLP):
    """Adds up the gradients that are about to be zeroed, and zeroes them only in part."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(16, 6))
        self.halves = 0

    def on_before_zero_grad(self, optimizer):
        gradient = self.net[0].weight.grad
        self.total += 0.0 if gradient is None else gradient

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.halves += 1
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * (1 + self.total.norm() + self.halves)}


@first_cells(3, "hook", ["on_before_backward", "on_after_backward", "on_before_optimizer_step"])
@first_cells(1, "options", [{}, {"micro_batch_size": 3}])
def test_hooks_of_a_repeated_step_see_the_gradients_of_the_step_before(hook, options):
    assert_recovered_as_undisturbed(SeesGradients, FailsIn(hook), **options)


def test_two_failures_of_one_batch_leave_no_trace():
    assert_recovered_as_undisturbed(Stateful, FailsIn("on_after_backward", times=2))


def test_a_failure_in_the_second_micro_batch_leaves_no_trace():
    assert_recovered_as_undisturbed(Stateful, FailsIn("on_before_backward", first=2), micro_batch_size=4)


class Measures(Stateful):
    """List states, compute groups, a full-state metric, and noise from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.all = MetricCollection([MulticlassPrecision(4), MulticlassF1Score(4), MulticlassAUROC(4, thresholds=None)])
        self.values, self.greatest = CatMetric(), MaxMetric()

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.all.update(outputs["logits"].softmax(-1), batch["y"])
        self.values.update(outputs["logits"][:, 0])
        self.greatest(outputs["logits"].max())
        self.log_dict(self.all, on_step=False, on_epoch=True)
        self.log("greatest", self.greatest, on_step=True, on_epoch=True)
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return outputs["loss"] * (1 + noise)

    def on_train_epoch_end(self):
        self.log("values", self.values.compute().mean())
        self.values.reset()


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "phase"), crossed([0, 4], ["forward", "backward"], fast=[(4, "backward")]))
def test_metric_lists_groups_and_generators_are_put_back(phase, batch):
    assert_recovered_as_undisturbed(Measures, Fails(phase, batch))


def test_generators_that_a_failed_attempt_seeded_anew_are_put_back():
    class Reseeds(FailsIn):
        def _maybe_fail(self, *_):
            if self.seen == self.batch and not self.raised:
                random.seed(9)
                np.random.seed(9)
                torch.manual_seed(9)
            super()._maybe_fail()

    assert_recovered_as_undisturbed(Measures, Reseeds("on_after_backward"))


@pytest.mark.slow
@pytest.mark.parametrize("phase", some(["forward", "backward"], "backward"))
def test_what_a_step_took_out_of_its_batch_is_there_again(phase):
    class Takes(MLP):
        def training_step(self, batch, batch_idx):
            labels = batch.pop("y")
            batch["x"] = batch["x"] * 2
            return super().training_step({**batch, "y": labels}, batch_idx)

    assert_recovered_as_undisturbed(Takes, Fails(phase))


def test_a_batch_whose_tensors_were_written_in_place_is_not_repeated():
    class Writes(MLP):
        def training_step(self, batch, batch_idx):
            batch["x"].mul_(2)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RunError, match="changed a tensor of its batch in place"):
        run(Writes, Fails("backward"))


class Counts(torch.optim.Optimizer):
    """Counts steps in plain numbers, in its group and in its state, before it writes.

    It runs out of memory between the two once.
    """

    def __init__(self, parameters, fails_at) -> None:
        super().__init__(parameters, {"lr": 0.05, "k": 0})
        self.fails_at = fails_at

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        group = self.param_groups[0]
        group["k"] += 1
        for parameter in group["params"]:
            self.state[parameter]["n"] = self.state[parameter].get("n", 0) + 1
        if group["k"] == self.fails_at:
            self.fails_at = None
            raise RuntimeError(TEXT)
        for parameter in group["params"]:
            parameter.add_(parameter.grad, alpha=-group["lr"] / (group["k"] + self.state[parameter]["n"]))


@pytest.mark.slow
@pytest.mark.parametrize("rollback", [slow(False), True])
def test_an_optimizers_plain_numbers_are_put_back(rollback):
    class Fails(MLP):
        fails_at = 3

        def configure_optimizers(self):
            return Counts(self.parameters(), self.fails_at)

    class Runs(Fails):
        fails_at = None

    module, _, trainer = run(Fails, optimizer_rollback=rollback)
    twin, _, _ = run(Runs, ShrinksAt(trainer.strategy.micro_batch_size, 2))

    assert trainer.strategy.recoveries == 1
    assert torch.equal(weights(module), weights(twin))


class Searches(MLP):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=4)


@pytest.mark.slow
def test_lbfgs_goes_back_to_before_its_first_closure_if_a_copy_was_asked_for():
    assert_recovered_as_undisturbed(Searches, FailsIn("on_after_backward", first=3), optimizer_rollback=True)


def test_lbfgs_without_a_copy_stops_half_way():
    with pytest.raises(HalfUpdatedError, match="some are written already"):
        run(Searches, FailsIn("on_after_backward", first=3))


def test_a_batch_without_rows_that_does_not_fit_is_said_to_be_uncuttable():
    class Scalar(MLP):
        def training_step(self, batch, batch_idx):
            raise RuntimeError(TEXT)

        def loader(self):
            return torch.utils.data.DataLoader([{"scale": 1.0}], batch_size=None)

    with pytest.raises(OutOfMemoryError, match="the activations of a batch that cannot be split do not fit"):
        run(Scalar)


def with_callbacks(folder, *, fails: bool):
    """Six steps, of which the third and fourth have NaN gradients.

    The third may run out of memory in `step`.
    """

    class Spoils(L.Callback):
        def on_after_backward(self, trainer, module):
            if trainer.global_step in (2, 3):
                for parameter in module.parameters():
                    parameter.grad.fill_(float("nan"))

    class Stops(torch.optim.SGD):
        calls = 0

        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                closure()
            self.calls += 1
            if fails and self.calls == 3:
                raise RuntimeError(TEXT)

    class Module(MLP):
        def configure_optimizers(self):
            return Stops(self.parameters(), 0.05)

    health = GradientHealth(check_every=1)
    files = RunCheckpoint(folder, every_n_steps=2, monitor=None, keep=10)
    module = Module().double()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(micro_batch_size=4),
        precision="64-true",
        max_epochs=2,
        logger=False,
        enable_model_summary=False,
        callbacks=[Spoils(), health, files, MemoryMonitor(every_n_batches=1), MemoryProgressBar()],
    )
    trainer.fit(module, module.loader())
    assert trainer.strategy.recoveries == int(fails)
    return health.nonfinite_steps, sorted(path.name for path in folder.iterdir()), trainer.global_step


def test_a_repeated_step_is_counted_once_by_the_callbacks(tmp_path):
    disturbed = with_callbacks(tmp_path / "a", fails=True)

    assert disturbed == with_callbacks(tmp_path / "b", fails=False)
    assert disturbed[0] == 2
    assert disturbed[1] == ["last.ckpt", "step_000002.ckpt", "step_000004.ckpt", "step_000006.ckpt"]


class HalfOnCPU(MixedPrecision):
    """float16 with a live scaler, on the device that is here."""

    def __init__(self) -> None:
        super().__init__(
            "16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        )


@pytest.mark.slow
@first_cells(
    1,
    "where",
    some(["forward", "backward", "optimizer.step", "on_before_optimizer_step"], "backward", "optimizer.step"),
)
def test_a_gradient_scaler_is_put_back(where):
    def train(*callbacks):
        torch.manual_seed(0)
        module = MLP(dropout=0.3)
        trainer = L.Trainer(
            accelerator="cpu",
            strategy="unified",
            plugins=[HalfOnCPU()],
            callbacks=list(callbacks),
            max_epochs=2,
            gradient_clip_val=0.3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, module.loader(dtype=torch.float32))
        return weights(module), trainer.precision_plugin.scaler.state_dict(), trainer.strategy.micro_batch_size

    failing = FailsIn(where) if where.startswith("on_") else Fails(where)
    mine, scale, limit = train(failing)
    theirs, twin_scale, _ = train(ShrinksAt(limit, failing.batch))

    assert failing.raised == 1
    assert torch.equal(mine, theirs)
    assert scale == twin_scale
