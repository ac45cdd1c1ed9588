"""GPU faults that raise nothing are detected, undone and repeated, or stop the run."""

import copy
import pickle

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import GpuFaultError
from lightning_unified.hardware.simulated import Abort
from lightning_unified.step.faults.canary import Canary
from lightning_unified.step.loop import UnifiedOptimization
from lightning_unified.step.loop.fault_checked import FaultCheckedOptimization
from tests.support.lanes import crossed, first_cells
from tests.support.lasting import Lasting
from tests.support.modules.plain import weights

ALL = 10**9  # operations: up to the next wait


class Rows(L.LightningModule):
    """A mean over rows, with momentum; fails if its results are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if self.fails_on_garbage and not torch.isfinite(loss):
            raise IndexError("garbage leads out of bounds")
        return loss

    fails_on_garbage = False

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Counting(Rows):
    """Rows with a metric that has counted already, and a prepared batch."""

    def __init__(self, *, prepares=False) -> None:
        super().__init__()
        self.seen = SumMetric()
        self.seen.update(100.0)
        self.prepares = prepares

    def configure_micro_batches(self, stage):
        return MicroBatchRules(prepare=self.prepare if self.prepares else None)

    def prepare(self, batch):
        self.strike(batch)
        probabilities = batch.sigmoid()
        if not ((probabilities >= 0) & (probabilities <= 1)).all():
            raise ValueError("garbage is no probability")
        self.seen.update(probabilities.sum())
        return probabilities

    def strike(self, batch):
        """Stands for a fault while the batch is prepared."""

    def training_step(self, batch, batch_idx):
        self.seen.update(batch.sum())
        return super().training_step(batch, batch_idx)


class Strikes(L.Callback):
    """Aborts a command buffer at a point of one batch."""

    done = Lasting()

    def __init__(self, point, times=1, batch=1, **abort):
        self.point, self.times, self.batch = point, times, batch
        self.abort = Abort(**{"after": 0, "operations": ALL, "says": False, **abort})

    def _pass(self, trainer, point, batch_idx=1):
        if (
            point == self.point
            and batch_idx == self.batch
            and self.done < self.times
            and self.done == trainer.strategy.recoveries
        ):
            self.done += 1
            trainer.strategy.simulated.command_queue.abort(self.abort)

    def setup(self, trainer, module, stage):
        step = module.training_step

        def training_step(batch, batch_idx):
            self._pass(trainer, "forward", batch_idx)
            loss = step(batch, batch_idx)
            self._pass(trainer, "backward", batch_idx)
            return loss

        module.training_step = training_step
        if hasattr(module, "strike"):
            module.strike = lambda _: self._pass(trainer, "prepare", trainer.fit_loop.total_batch_idx)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self._pass(trainer, "optimizer step", 1 if trainer.global_step == 1 else 0)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self._pass(trainer, "validation", 1 if trainer.global_step else 0)


class Smaller(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            trainer.strategy.sizes.max_micro_batch_size = 4


def train(folder, *callbacks, module=None, resume=None, validates=False, max_steps=-1, **options):
    torch.manual_seed(0)
    module = module or Rows()
    strategy = UnifiedStrategy(**{"simulate": "m2-16gb", "predict": False, "check_split": False, **options})
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=2 if validates else None,
        default_root_dir=str(folder),
    )
    loader = torch.utils.data.DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), batch_size=8)
    trainer.fit(module, loader, loader if validates else None, ckpt_path=resume)
    return module, trainer


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return weights(train(tmp_path_factory.mktemp("twin"), Smaller())[0])


@first_cells(1, "leaves", ["stale", "nan"])
@pytest.mark.parametrize("point", ["forward", "backward", "optimizer step"])
def test_a_run_with_a_lost_command_buffer_equals_the_undisturbed_one(tmp_path, twin, point, leaves):
    strikes = Strikes(point, leaves=leaves)
    module, trainer = train(tmp_path, strikes, optimizer_rollback=point == "optimizer step")

    assert (strikes.done, trainer.strategy.recoveries) == (1, 1)
    assert trainer.strategy.simulated.command_queue.lost
    assert torch.equal(weights(module), twin)
    assert "GPU fault in " + ("optimizer" if point == "optimizer step" else "forward or") in trainer.strategy.events[0]


def test_the_runtimes_message_alone_repeats_the_step(tmp_path, twin):
    strikes = Strikes("forward", operations=1, says=True, spares_integers=True)
    module, trainer = train(tmp_path, strikes)

    assert "the runtime reports" in trainer.strategy.events[0]
    assert "canary" not in trainer.strategy.events[0]
    assert torch.equal(weights(module), twin)


def test_an_error_that_garbage_led_to_repeats_the_step(tmp_path, twin):
    module = Rows()
    module.fails_on_garbage = True
    torch.manual_seed(0)
    module.load_state_dict(Rows().state_dict())
    module, trainer = train(tmp_path, Strikes("forward", leaves="nan"), module=module)

    assert trainer.strategy.recoveries == 1
    assert torch.equal(weights(module), twin)


def test_lost_weights_without_a_copy_stop_the_run_and_are_not_saved(tmp_path):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    with pytest.raises(GpuFaultError, match=r"between two steps .*optimizer_rollback=True"):
        train(tmp_path, Strikes("optimizer step"), Saves())
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]


def test_a_fault_that_persists_stops_with_a_checkpoint_that_resumes(tmp_path):
    strikes = Strikes("forward", times=99)
    with pytest.raises(GpuFaultError, match=r"5 times in a row, .*micro-batches of 1 row .*gpu_fault\.ckpt holds them"):
        train(tmp_path, strikes)
    saved = tmp_path / "gpu_fault.ckpt"
    held = torch.load(saved, weights_only=False)
    once, _ = train(tmp_path, max_steps=1)
    _, resumed = train(tmp_path, resume=str(saved))

    assert (strikes.done, held["global_step"], resumed.global_step) == (5, 1, 3)
    assert all(torch.equal(held["state_dict"][name], value) for name, value in once.state_dict().items())


def test_a_batch_that_cannot_be_split_is_repeated_whole(tmp_path):
    rules = MicroBatchRules(splittable=False)
    module, trainer = train(tmp_path, Strikes("backward"), micro_batches=rules)

    assert "repeated whole" in trainer.strategy.events[0]
    assert torch.equal(weights(module), weights(train(tmp_path)[0]))


def test_findings_of_a_check_on_garbage_are_dropped(tmp_path, twin):
    module, trainer = train(tmp_path, Strikes("forward", times=2), check_split=True)

    assert trainer.strategy.recoveries == 2
    assert trainer.strategy.policy.splits.verdict.conclusive
    assert torch.allclose(weights(module), twin)


@first_cells(
    1,
    ("window_mean", "point", "leaves"),
    crossed(
        ["batches", "terms"],
        ["forward", "backward"],
        ["stale", "nan"],
        fast=[("batches", "forward", "stale"), ("terms", "backward", "nan")],
    ),
)
def test_a_trial_run_that_is_lost_leaves_the_state_as_it_was(tmp_path, window_mean, point, leaves):
    options = {"micro_batch_size": 4, "check_split": True, "window_mean": window_mean}
    torch.manual_seed(0)
    twin, _ = train(tmp_path, module=Counting(), **options)
    torch.manual_seed(0)
    strikes = Strikes(point, batch=0, leaves=leaves)
    module, trainer = train(tmp_path, strikes, module=Counting(), **options)

    assert (strikes.done, trainer.strategy.recoveries) == (1, 1)
    assert torch.allclose(module.seen.compute(), twin.seen.compute())
    assert torch.allclose(weights(module), weights(twin))


@pytest.mark.parametrize("leaves", ["stale", "nan"])
def test_a_prepared_batch_that_is_lost_is_prepared_again(tmp_path, leaves):
    torch.manual_seed(0)
    twin, _ = train(tmp_path, module=Counting(prepares=True))
    torch.manual_seed(0)
    strikes = Strikes("prepare", leaves=leaves)
    module, trainer = train(tmp_path, strikes, module=Counting(prepares=True))

    assert (strikes.done, trainer.strategy.recoveries) == (1, 1)
    assert torch.equal(module.seen.compute(), twin.seen.compute())
    assert torch.equal(weights(module), weights(twin))


def test_copies_that_are_lost_stop_the_run_before_the_step(tmp_path):
    class Early(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 1:
                trainer.strategy.simulated.command_queue.abort(Abort(after=0, operations=ALL, says=False))

    with pytest.raises(GpuFaultError, match="between two steps"):
        train(tmp_path, Early(), module=Counting())


def test_a_message_from_an_evaluation_is_reported_and_trains_on(tmp_path):
    module, trainer = train(tmp_path, Strikes("validation", operations=1, says=True), validates=True)

    assert any("lost work of an evaluation" in event for event in trainer.strategy.events)
    assert torch.equal(weights(module), weights(train(tmp_path)[0]))


def test_without_recovery_a_fault_stops_before_the_weights_are_written(tmp_path):
    module = Rows()
    with pytest.raises(GpuFaultError, match="recover=False"):
        train(tmp_path, Strikes("forward"), module=module, recover=False)
    torch.manual_seed(0)
    once = Rows()
    assert module.net[0].weight.isfinite().all()
    assert not torch.equal(weights(module), weights(once))  # the first batch was sound


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, FaultCheckedOptimization),
        ({"detect_faults": False}, UnifiedOptimization),
        ({"simulate": "rtx3060-12gb"}, UnifiedOptimization),
        ({"simulate": None}, UnifiedOptimization),
    ],
)
def test_only_macs_are_checked(tmp_path, options, kind):
    hooks = []

    class Looks(L.Callback):
        def on_train_start(self, trainer, module):
            hooks.append(sum(len(child._forward_hooks) for child in module.modules()))

    module, trainer = train(tmp_path, Looks(), **options)
    assert type(trainer.fit_loop.epoch_loop.automatic_optimization) is kind
    assert bool(hooks[0]) is (kind is FaultCheckedOptimization)
    assert not any(child._forward_hooks for child in module.modules())


def test_copies_of_a_watched_module_make_no_marks():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    canary = Canary(module, [], torch.device("cpu"))
    canary.is_active = True
    for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        one(torch.zeros(1, 2)).sum().backward()
    copies = canary._expected
    module(torch.zeros(1, 2)).sum().backward()

    assert (copies, canary._expected, canary.missing()) == (0, 4, 0)


def test_a_module_in_a_transform_of_functions_makes_no_marks():
    module = nn.Linear(2, 2)
    canary = Canary(module, [], torch.device("cpu"))
    canary.is_active = True
    rows = torch.randn(3, 2)
    torch.func.jvp(module, (rows,), (rows,))
    torch.func.vmap(torch.func.jacrev(module))(rows)

    assert (canary._expected, canary.missing()) == (0, 0)
