"""Models of the transformers library are split, with dropout on.

Only losses that mix rows are refused.
"""

import lightning as L
import pytest
import torch

from tests.support.lanes import first_cells, some
from tests.support.modules.plain import weights

pytest.importorskip("transformers")

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.zoo.transformers import ARCHITECTURES, MIXING, SPEC_AUGMENT, SPLITTABLE, Architecture

EVERY_DAY = ("GPT-2",)
SAID = "random draws, such as dropout's, are made for each micro-batch, not for the whole batch"

of_each_architecture = pytest.mark.parametrize(
    "name", [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in SPLITTABLE]
)


def fit(architecture: Architecture, strategy="auto", *, dropout=0.0, attention="sdpa", precision="32-true"):
    module = architecture.make(dropout=dropout, attention=attention)
    torch.manual_seed(3)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, architecture.loader())
    return module, trainer


def chosen_rule(trainer) -> str:
    return trainer.strategy.plan.reasons["loss_weight"]


def assert_same(architecture: Architecture, **options) -> None:
    plain, plain_trainer = fit(architecture, **options)
    ours, trainer = fit(architecture, UnifiedStrategy(micro_batch_size=3), **options)

    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-5, atol=1e-5)
    assert trainer.callback_metrics.keys() == plain_trainer.callback_metrics.keys()
    for name, value in plain_trainer.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value, rtol=1e-5, atol=1e-5)
    assert chosen_rule(trainer).startswith(f"{architecture.rule}: gradients of")


def assert_split_with_dropout(architecture: Architecture, **options) -> None:
    module, trainer = fit(architecture, UnifiedStrategy(micro_batch_size=3), dropout=0.1, **options)

    assert trainer.global_step == 3
    assert weights(module).isfinite().all()
    assert chosen_rule(trainer).startswith(f"{architecture.rule}: gradients of")
    assert SAID in trainer.strategy.events
    assert not [event for event in trainer.strategy.events if "unchecked" in event or "compared without" in event]


@of_each_architecture
def test_without_dropout_it_equals_plain_lightning(name):
    assert_same(SPLITTABLE[name])


@of_each_architecture
@pytest.mark.parametrize("precision", some(["32-true", "bf16-mixed", "bf16-true"], "32-true"))
def test_with_dropout_the_check_is_conclusive_and_draws_are_said(name, precision):
    assert_split_with_dropout(SPLITTABLE[name], precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", SPLITTABLE)
def test_eager_attention_with_dropout_is_split_too(name, precision):
    assert_split_with_dropout(SPLITTABLE[name], attention="eager", precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITTABLE)
def test_eager_attention_without_dropout_equals_plain_lightning(name):
    assert_same(SPLITTABLE[name], attention="eager")


@pytest.mark.slow
def test_masks_drawn_by_numpy_are_said_to_be_left_out_of_the_comparison():
    _, trainer = fit(SPEC_AUGMENT, UnifiedStrategy(micro_batch_size=3), dropout=0.1)

    assert chosen_rule(trainer).startswith("rows: gradients of")
    assert any(event.startswith(SAID) and "compared without" in event for event in trainer.strategy.events)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@first_cells(1, "name", MIXING)
def test_losses_that_mix_rows_are_refused(name, dropout):
    with pytest.raises(SplitError, match="cannot be split exactly"):
        fit(ARCHITECTURES[name], UnifiedStrategy(micro_batch_size=3), dropout=dropout)
