"""`UnifiedStrategy(recompute=…)` on any module: same weights, less memory.

Weights agree bit for bit, and the end of the fit undoes everything.
"""

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import ConfigurationError
from tests.support.lanes import first_cells
from tests.support.modules.recomputed import Deep, Switch, fit, trained


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Replace the collection of a whole session's garbage after each error: it is slow."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@first_cells(
    1,
    ("strategy", "options"),
    [
        ({}, {}),
        ({}, {"precision": "bf16-mixed"}),
        ({}, {"accumulate_grad_batches": 2}),
        ({"micro_batch_size": 3, "batch_norm": "micro"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    ],
    ids=["plain", "bf16-mixed", "window", "micro-batches in a window"],
)
def test_weights_statistics_and_generators_equal_those_without_it_bit_for_bit(strategy, options):
    _, plain, _ = trained(recompute=False, strategy=strategy, **options)
    module, again, trainer = trained(recompute=True, strategy=strategy, **options)

    assert_equal(plain, again)
    assert module.layers[0].norm.num_batches_tracked == (9 if strategy else 3)
    assert trainer.strategy.plan.recompute is True


def test_blocks_run_twice_while_it_lasts_and_the_plan_names_them():
    module, _, trainer = trained(recompute=True)

    assert [layer.runs for layer in module.layers] == [6, 6, 6]
    assert trainer.strategy.plan.reasons["recompute"] == "as asked: 3 blocks of layers (Block), detected"


def test_it_is_undone_when_the_fit_ends():
    module, _, _ = trained(recompute=True)

    assert not any("forward" in vars(child) for child in module.modules())


def test_it_is_undone_when_the_fit_fails():
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            assert module.recomputes
            raise KeyError("on purpose")

    module = Deep()
    with pytest.raises(KeyError, match="on purpose"):
        fit(module, UnifiedStrategy(recompute=True), callbacks=[Fails()])

    assert not module.recomputes


def test_checkpoints_have_the_same_keys_and_a_run_resumes_from_one(tmp_path):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    _, whole, _ = trained(recompute=True, callbacks=[Saves()])
    saved = torch.load(tmp_path / "2.ckpt", weights_only=False)
    module = Deep()
    fit(module, UnifiedStrategy(recompute=True), max_epochs=2)

    assert list(saved["state_dict"]) == list(Deep().state_dict())
    assert_equal(list(saved["state_dict"].values()), whole[:-1])


def test_a_module_without_blocks_is_refused_with_the_ways_out():
    text = r"recompute=True: BoringModel has no ModuleList .* recompute_blocks = .* has a `recompute` attribute"
    with pytest.raises(ConfigurationError, match=text):
        fit(BoringModel(), UnifiedStrategy(recompute=True))


def test_a_declaration_is_followed():
    class Declares(Deep):
        def recompute_blocks(self):
            return list(self.layers[1:])

    module, _, trainer = trained(Declares, recompute=True)

    assert [layer.runs for layer in module.layers] == [3, 6, 6]
    assert "2 blocks of layers (Block), declared" in trainer.strategy.plan.reasons["recompute"]


def test_the_modules_own_switch_is_set_and_nothing_else():
    module, _, trainer = trained(Switch, recompute=True)

    assert module.recompute is True
    assert [layer.runs for layer in module.layers] == [3, 3, 3]
    assert trainer.strategy.plan.reasons["recompute"] == "as asked, by Switch.recompute"


def test_blocks_that_checkpoint_themselves_are_left_alone_and_that_is_said():
    class Checkpoints(Deep):
        gradient_checkpointing = True

    module, _, trainer = trained(Checkpoints, recompute=True)

    assert module.layers[0].runs == 3
    assert "3 of them the module recomputes itself" in trainer.strategy.plan.reasons["recompute"]


def test_false_leaves_a_module_without_a_switch_as_it_is():
    module, _, trainer = trained(recompute=False)

    assert module.layers[0].runs == 3
    assert trainer.strategy.plan.recompute is False


def test_validation_alone_needs_no_blocks():
    trainer = L.Trainer(
        accelerator="cpu", strategy=UnifiedStrategy(recompute=True), logger=False, enable_progress_bar=False
    )
    trainer.validate(BoringModel(), verbose=False)

    assert trainer.state.finished
