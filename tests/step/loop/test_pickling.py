"""A Trainer can be pickled at any time of a fit, and a copy of it can train.

Spawned worker processes of a loader need this.
"""

import pickle

import lightning as L
import pytest
import torch
from torch import nn

from lightning_unified import MicroBatchRules, UnifiedDDPStrategy, UnifiedStrategy
from lightning_unified.callbacks import (
    CudaGraphs,
    GracefulInterrupt,
    GradientHealth,
    MemoryMonitor,
    MemoryProgressBar,
    PressureGuard,
    RichMemoryProgressBar,
    RunCheckpoint,
    RunCSVLogger,
)
from lightning_unified.errors import ConfigurationError
from tests.support.lanes import first_cells, slow
from tests.support.modules.plain import MLP, fit, weights
from tests.support.modules.spawned import Spawned, SpawnedTokens, ValidatedMLP, gearhead

HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_train_end",
    "on_fit_end",
)


def rows_of(batch):
    return len(batch["x"])


class Pickles(L.Callback):
    """Sends the Trainer through pickle in every hook, once each."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        for hook in HOOKS:
            setattr(self, hook, lambda trainer, *_, name=hook, **__: self._look(trainer, name))

    def __reduce__(self):
        return Pickles, ()

    def _look(self, trainer, name):
        if name not in self.done:
            copy = pickle.loads(pickle.dumps(trainer.fit_loop)).trainer
            assert copy.global_step == trainer.global_step and copy.current_epoch == trainer.current_epoch
            self.done.add(name)


FAILURES: list[int] = []  # what a callback keeps of its own is put back before a step is repeated


class FailsOnce(L.Callback):
    """Runs out of memory before the backward pass of the second batch."""

    def on_fit_start(self, trainer, pl_module):
        FAILURES.clear()

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 1 and not FAILURES:
            FAILURES.append(trainer.global_step)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Blocks(ValidatedMLP):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), *[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)], nn.Linear(16, 4)
        )


@first_cells(
    1,
    ("kind", "bar", "options"),
    [
        slow(ValidatedMLP, MemoryProgressBar, {}),
        (
            ValidatedMLP,
            MemoryProgressBar,
            {"micro_batch_size": 3, "micro_batches": MicroBatchRules(loss_weight=lambda batch: rows_of(batch))},
        ),
        slow(
            ValidatedMLP, RichMemoryProgressBar, {"simulate": "m2-16gb", "micro_batch_size": 3, "window_mean": "terms"}
        ),
        (Blocks, RichMemoryProgressBar, {"recompute": True, "optimizer_kernel": "foreach", "optimizer_rollback": True}),
    ],
    ids=["whole", "split", "simulated", "recomputed"],
)
def test_a_trainer_pickles_in_every_hook_beside_every_callback(tmp_path, kind, bar, options):
    pickles = Pickles()
    ours = [GracefulInterrupt(), GradientHealth(), MemoryMonitor(), PressureGuard(), CudaGraphs()]
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(**options),
        max_epochs=1,
        logger=RunCSVLogger(tmp_path),
        callbacks=[*ours, bar(), RunCheckpoint(tmp_path, monitor="validation"), pickles, FailsOnce()],
        default_root_dir=tmp_path,
        enable_model_summary=False,
    )
    loader = kind.loader(dtype=torch.float32)

    trainer.fit(kind(), loader, loader)

    assert pickles.done == set(HOOKS) and trainer.strategy.recoveries == 1
    pickle.loads(pickle.dumps(trainer.callbacks))
    pickle.loads(pickle.dumps(trainer.fit_loop.epoch_loop))


@pytest.mark.slow
def test_a_copy_of_a_trainer_trains_as_the_trainer_would():
    def trained(copies: bool):
        torch.manual_seed(0)
        module = MLP().double()
        _, trainer = fit(module, MLP.loader(), strategy=UnifiedStrategy(micro_batch_size=3), callbacks=[FailsOnce()])
        if copies:
            trainer = pickle.loads(pickle.dumps(trainer))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, MLP.loader())
        return trainer, module

    (trainer, module), (copy, twin) = trained(False), trained(True)

    assert copy.global_step == trainer.global_step == 9
    torch.testing.assert_close(weights(twin), weights(module), rtol=0, atol=0)


def test_a_copy_keeps_rules_that_can_be_pickled():
    copy = pickle.loads(pickle.dumps(UnifiedStrategy(micro_batches=MicroBatchRules(loss_weight=rows_of, unit=2))))

    assert copy.policy.batches.given == MicroBatchRules(loss_weight=rows_of, unit=2)


@pytest.mark.parametrize("kind", [UnifiedStrategy, UnifiedDDPStrategy])
def test_a_copy_without_its_rules_refuses_to_train(kind):
    given = kind(micro_batches=MicroBatchRules(loss_weight=lambda batch: rows_of(batch)))
    copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(given))))

    assert given.policy.batches.of("fit").loss_weight is not None
    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        copy.policy.batches.of("fit")


def test_a_copied_simulated_machine_is_under_the_same_pressure_and_counts_nothing():
    strategy = UnifiedStrategy(simulate="m2-16gb")
    machine = strategy.simulated
    machine.others += 2**30
    with machine.active():
        held = torch.ones(2**20)
        copy = pickle.loads(pickle.dumps(strategy)).simulated

    assert machine.allocator.allocated >= held.nbytes and copy.allocator.allocated == 0
    assert copy.profile is machine.profile and copy.others == machine.others
    assert copy.reading().total.bytes == machine.reading().total.bytes


def in_workers(start, make, data, *, strategy="auto", callbacks=()):
    """Train with batches that `data` loads; return weights, figures and the Trainer."""
    torch.manual_seed(0)
    module = make().double()
    seen, trainer = fit(module, data(start), strategy=strategy, callbacks=callbacks)
    return weights(module), seen.callback_metrics, trainer


def same_in_workers(make, data, *, start="spawn", callbacks=(), **options):
    plain_weights, plain_figures, _ = in_workers(None, make, data)
    ours, figures, trainer = in_workers(start, make, data, strategy=UnifiedStrategy(**options), callbacks=callbacks)

    torch.testing.assert_close(ours, plain_weights, rtol=1e-11, atol=1e-13)
    assert [sorted(one) for one in figures] == [sorted(one) for one in plain_figures]
    for one, other in zip(figures, plain_figures, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    return trainer.strategy


@pytest.mark.slow
@pytest.mark.parametrize("start", [slow("spawn"), "forkserver"])
def test_started_workers_collate_while_memory_runs_out(start):
    strategy = same_in_workers(MLP, Spawned, start=start, callbacks=[FailsOnce()])

    assert strategy.recoveries == 1 and strategy.micro_batch_size == 4


# the suite of one model with spawned workers


def validated(start):
    return Spawned(start, validates=True)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 3}, {"recompute": "auto", "window_mean": "terms"}])
def test_started_workers_collate_for_whole_and_split_batches(start, options):
    same_in_workers(ValidatedMLP, validated, start=start, **options)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["auto", 1, 3])
def test_spawned_workers_collate_for_gearhead(size):
    same_in_workers(gearhead, SpawnedTokens, micro_batch_size=size)


@pytest.mark.slow
def test_spawned_workers_collate_for_gearhead_while_memory_runs_out():
    strategy = same_in_workers(gearhead, SpawnedTokens, callbacks=[FailsOnce()])

    assert strategy.recoveries == 1
