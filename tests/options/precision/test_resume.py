"""A resumed run keeps its scale in the same precision, and reports a change of precision."""

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import precision as stock

from lightning_unified.callbacks import RunCheckpoint
from lightning_unified.precision import MixedPrecision
from tests.support.lanes import first_cells
from tests.support.runs.scaled import Scales, fit, fresh, live, weights


class Stops(L.Callback):
    """Ends the run after `batches` batches."""

    def __init__(self, batches):
        self.left = batches

    def on_train_batch_end(self, trainer, *_):
        self.left -= 1
        trainer.should_stop = self.left == 0


def stopped(folder, *, batches, **options):
    """Train `batches` batches and return the checkpoint."""
    fit(fresh(), Stops(batches), RunCheckpoint(folder), **options)
    return folder / "last.ckpt"


def saved_by(strategy, folder):
    """Train one epoch of six batches under `strategy` and save it as Lightning does."""
    trainer = fit(fresh(), strategy=strategy, epochs=1)
    trainer.save_checkpoint(folder / "plain.ckpt")
    return folder / "plain.ckpt"


def test_a_resumed_run_has_the_scale_and_weights_of_one_that_never_stopped(tmp_path):
    whole, whole_scales = fresh(), Scales()
    fit(whole, whole_scales, RunCheckpoint(tmp_path / "a"))
    file = stopped(tmp_path / "b", batches=6)
    rest, rest_scales = fresh(seed=9), Scales()
    fit(rest, rest_scales, RunCheckpoint(tmp_path / "b"), resume=file, plugins=[live(scale=2.0)])

    assert rest_scales.seen == whole_scales.seen[6:]
    assert torch.equal(weights(rest), weights(whole))


@pytest.mark.parametrize(("before", "after"), [("auto", "unified"), ("unified", "auto")])
def test_a_scale_goes_from_lightnings_plugin_to_ours_and_back(tmp_path, before, after):
    file = saved_by(before, tmp_path)
    scales = Scales()
    fit(fresh(), scales, strategy=after, resume=file, plugins=[live(scale=2.0)])

    assert scales.seen[0] == (2**12, 1)


def test_lightning_drops_the_scale_silently_if_the_plugin_class_is_renamed(tmp_path):
    class Other(stock.MixedPrecision):
        pass

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
    scales = Scales()
    fit(
        fresh(),
        scales,
        strategy="auto",
        resume=saved_by("auto", tmp_path),
        plugins=[Other("16-mixed", "cpu", scaler=scaler)],
    )

    assert scales.seen[0] == (2, 1)


def test_from_fp16_to_bf16_the_run_goes_on_with_a_notice(tmp_path, monkeypatch):
    messages, file = [], saved_by("unified", tmp_path)
    monkeypatch.setattr("lightning_unified.precision.mixed.rank_zero_info", messages.append)
    trainer = fit(fresh(), resume=file, precision="bf16-mixed")

    assert trainer.global_step == 12
    assert trainer.precision_plugin.scaler is None
    assert len(messages) == 1
    assert "made in 16-mixed; bf16-mixed needs no gradient scaler" in messages[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_to_fp16_the_run_goes_on_with_a_new_scaler_and_a_warning(tmp_path, precision):
    trainer = fit(fresh(), epochs=1, precision=precision)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    scales = Scales()
    with pytest.warns(UserWarning, match="holds no gradient-scaler state.* the scaler starts anew at 1024"):
        trainer = fit(fresh(), scales, resume=tmp_path / "other.ckpt")

    assert trainer.global_step == 12
    assert scales.seen[0] == (2**10, 1)


def test_an_empty_state_which_torch_refuses_leaves_the_scaler_as_it_is():
    plugin = MixedPrecision("16-mixed", device_type="cpu")
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        stock.MixedPrecision("16-mixed", "cpu").load_state_dict({})
    plugin.load_state_dict({})

    assert plugin.scaler.get_scale() == 2**16


def test_a_checkpoint_that_lightning_wrote_before_2_0_is_not_warned_of(recwarn):
    plugin = MixedPrecision("16-mixed", device_type="cpu")
    plugin.on_load_checkpoint({"native_amp_scaling_state": plugin.state_dict()})

    assert not recwarn.list


@first_cells(
    2,
    ("before", "after", "factor"),
    [
        ({}, {"precision": "bf16-mixed"}, 2.0**-10),
        ({"precision": "bf16-mixed"}, {}, 2.0**10),
        ({}, {}, 1.0),
    ],
    ids=["fp16 to bf16", "bf16 to fp16", "fp16 to fp16"],
)
@pytest.mark.filterwarnings("ignore:The checkpoint holds no gradient-scaler state")
def test_an_open_window_goes_on_under_the_scale_of_the_new_precision(tmp_path, before, after, factor):
    """Gradients in `.grad` are multiplied by the scale.

    A bf16 step that used them as they are would be 1024 times too far.
    """
    window = {"accumulate_grad_batches": 3}
    file = stopped(tmp_path, batches=1, **window, **before)
    saved = torch.load(file)["lightning_unified.continuation"]["gradients"].values()
    module = fresh()
    fit(module, RunCheckpoint(tmp_path), resume=file, **window, **after)

    assert any(bool(gradient.any()) for gradient in saved)
    assert all(torch.equal(mine, then * factor) for mine, then in zip(module.found, saved, strict=True))


def test_an_overflown_open_window_drops_its_gradients_if_nothing_would_skip_them(tmp_path):
    window = {"accumulate_grad_batches": 3}
    fit(fresh(spoilt={0}), Stops(1), RunCheckpoint(tmp_path), **window)
    module = fresh()
    with pytest.warns(UserWarning, match="were not finite in 16-mixed.* the window continues without them"):
        fit(module, RunCheckpoint(tmp_path), resume=tmp_path / "last.ckpt", precision="bf16-mixed", **window)

    assert module.found == [None] * 4
    assert weights(module).isfinite().all()
