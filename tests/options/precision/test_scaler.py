"""Runs with a live gradient scaler equal Lightning's own, and recover without a trace."""

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import precision as stock

from lightning_unified import UnifiedStrategy
from lightning_unified.callbacks import GradientHealth
from lightning_unified.errors import GradientError
from lightning_unified.precision import MixedPrecision
from tests.support.lanes import crossed, first_cells
from tests.support.lasting import Lasting
from tests.support.runs.scaled import Scales, fit, fresh, live, weights

TEXT = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_with_a_scaler_is_the_one_of_plain_lightning(fused):
    found = []
    for strategy in ("auto", "unified"):
        module, scales = fresh(fused=fused, spoilt={4}), Scales()
        trainer = fit(module, scales, strategy=strategy)
        found.append((weights(module), scales.seen))

    assert type(trainer.precision_plugin) is MixedPrecision
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[1][1][:6] == [(2**10, 1), (2**10, 2), (2**11, 0), (2**11, 1), (2**10, 0), (2**10, 1)]


@first_cells(1, "size", [1, 3])
def test_micro_batches_under_a_scaler_make_the_gradients_of_the_whole(size):
    whole, parts = fresh(), fresh()
    fit(whole, epochs=1)
    trainer = fit(parts, strategy=UnifiedStrategy(micro_batch_size=size), epochs=1)

    assert trainer.strategy.micro_batch_size < 4
    torch.testing.assert_close(weights(parts), weights(whole), rtol=2e-2, atol=2e-3)
    assert trainer.precision_plugin.state_dict()["scale"] == 2**12


class RunsOut(L.Callback):
    """Memory runs out once, in batch `batch`.

    It runs out in the backward pass, while gradients are unscaled, or in the optimizer's step.

    Where the scaler skips that step, it is the next one; `batch` then says which it was.
    """

    batch, raised = Lasting(), Lasting()

    def __init__(self, where, batch, monkeypatch):
        self.where, self.batch, self.patch = where, batch, monkeypatch

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.module = module
        if module.batches != self.batch:
            return
        if self.where == "backward":
            handle = module.net[0].weight.register_hook(lambda _: (handle.remove(), self._raise()))
        elif self.where == "unscaling":
            real = getattr(torch, UNSCALE)
            self.patch.setattr(torch, UNSCALE, lambda *args: (real(*args), self._raise()))
        else:
            optimizer = trainer.optimizers[0]
            real_init = optimizer._init_group
            optimizer._init_group = lambda *args, **kwargs: (self._raise(), real_init(*args, **kwargs))[1]

    def _raise(self):
        if not self.raised:
            self.raised += 1
            self.batch = self.module.batches
            raise RuntimeError(TEXT)


class Halves(L.Callback):
    """The undisturbed twin: uses half the size from the same batch on."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if module.batches == self.batch:
            trainer.strategy.sizes.max_micro_batch_size = 2


@first_cells(
    1,
    ("where", "fused", "window", "batch"),
    crossed(
        ["backward", "unscaling", "optimizer step"],
        [False, True],
        [1, 2],
        [0, 4],
        fast=[
            ("backward", True, 2, 0),
            ("unscaling", True, 1, 0),
            ("optimizer step", False, 1, 0),
        ],
    ),
)
def test_memory_that_runs_out_leaves_scale_tracker_and_weights_as_undisturbed(monkeypatch, where, fused, window, batch):
    """Batch 4 overflows as well: its step is skipped and the scale halved, once."""
    if where != "backward" and batch % window != window - 1:
        batch += 1  # the optimizer steps at a window's end
    options = {"accumulate_grad_batches": window}
    failing, scales = RunsOut(where, batch, monkeypatch), Scales()
    module = fresh(fused=fused, spoilt={4})
    trainer = fit(module, failing, scales, **options)
    monkeypatch.undo()
    twin, twins_scales = fresh(fused=fused, spoilt={4}), Scales()
    fit(twin, Halves(failing.batch), twins_scales, **options)

    assert (failing.raised, trainer.strategy.recoveries, trainer.strategy.micro_batch_size) == (1, 1, 2)
    assert scales.seen == twins_scales.seen
    assert torch.equal(weights(module), weights(twin))


def test_what_a_fused_optimizer_was_handed_does_not_outlive_the_failed_step(monkeypatch):
    """Without it the repeated step would divide its gradients by the scale twice.

    It would also skip a step without need.
    """
    module, failing = fresh(fused=True), RunsOut("optimizer step", 1, monkeypatch)
    left = []

    class Looks(L.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            left.append({"grad_scale", "found_inf"} & set(vars(optimizer)))

    fit(module, failing, Looks(), epochs=1)

    assert failing.raised == 1
    assert not any(left)


def test_steps_that_only_skip_end_the_run_and_a_scale_below_one_is_warned_about():
    module = fresh(spoilt=range(100))
    before = weights(module)
    health = GradientHealth(scaler_patience=20, check_every=6)
    with (
        pytest.warns(UserWarning, match=r"the gradient scale has fallen to 0\.5"),
        pytest.raises(
            GradientError, match="in 24 optimizer steps in a row, 1 to 24; the gradient scaler skipped these"
        ),
    ):
        fit(module, health, plugins=[live(scale=2.0**16)], epochs=5)

    assert torch.equal(weights(module), before)


def test_a_scaler_that_finds_its_scale_is_left_alone(recwarn):
    module = fresh()
    health = GradientHealth(scaler_patience=20, check_every=6)
    trainer = fit(module, health, plugins=[live(scale=2.0**24, growth_interval=2000)], epochs=4)

    assert 0 < health.nonfinite_steps < 15
    assert trainer.precision_plugin.state_dict()["scale"] > 1
    assert not any("come down" in str(warning.message) for warning in recwarn)


def test_bf16_parameters_train_under_a_scaler():
    module = fresh()
    module.net[0].bfloat16()
    before = weights(module)
    scales = Scales()
    fit(module, scales, epochs=1)

    assert not torch.equal(weights(module), before)
    assert scales.seen[-1] == (2**12, 0)


def test_half_parameters_train_under_a_scaler_with_a_fused_optimizer():
    module = fresh(fused=True).half()
    before = weights(module)
    scales = Scales()
    fit(module, scales, epochs=1)

    assert weights(module).isfinite().all()
    assert not torch.equal(weights(module), before)
    assert scales.seen[-1] == (2**12, 0)


def test_half_precision_trains_without_a_scaler():
    module = fresh()
    before = weights(module)
    trainer = fit(module, epochs=1, precision="bf16-true")

    assert type(trainer.precision_plugin) is stock.HalfPrecision
    assert not torch.equal(weights(module).float(), before)
