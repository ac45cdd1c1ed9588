"""A resumed run without memory for its first check uses the earlier run's findings."""

import copy

import lightning as L
import numpy as np
import pytest
import torch

from lightning_unified import MicroBatchRules, UnifiedStrategy
from tests.support.modules.plain import weights
from tests.support.modules.split import ShiftedTokens

TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


class Keeps(ShiftedTokens):
    """Counts steps, draws from its own generator, and keeps a moving mean over rows.

    All of it decides the loss.
    """

    memory = 8  # rows

    def __init__(self):
        super().__init__()
        self.steps, self.rng = 0, np.random.default_rng(0)
        self.register_buffer("centre", torch.zeros(()))

    def loss(self, out, labels):
        if len(out) > self.memory:
            raise RuntimeError(TEXT)
        self.steps += 1
        factor = 1.0 + 0.1 * self.rng.random() + 0.01 * self.steps + self.centre
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean()
        return factor * super().loss(out, labels)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = copy.deepcopy((self.steps, self.rng.bit_generator.state))

    def on_load_checkpoint(self, checkpoint):
        self.steps, self.rng.bit_generator.state = copy.deepcopy(checkpoint["own"])


def trained(*, epochs, strategy="auto", memory=8, resumed=None):
    """Return the module after `epochs`, and the trainer."""
    torch.manual_seed(0)
    module = Keeps().double()
    module.memory = memory
    trainer = L.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=epochs,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Keeps.loader(), ckpt_path=resumed)
    return module, trainer


@pytest.fixture
def checkpoint(tmp_path):
    """The checkpoint of a run over one epoch of split batches."""
    _, trainer = trained(epochs=1, strategy=UnifiedStrategy(micro_batch_size=3))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def test_a_resumed_run_that_cannot_check_goes_by_what_was_found(checkpoint):
    strategy = UnifiedStrategy(micro_batch_size=1)
    resumed, _ = trained(epochs=2, strategy=strategy, memory=1, resumed=checkpoint)
    plain, _ = trained(epochs=2)

    assert strategy.plan.reasons["loss_weight"].endswith("found by the run that this one continues")
    assert resumed.steps == plain.steps == 6
    assert resumed.rng.bit_generator.state == plain.rng.bit_generator.state
    torch.testing.assert_close(resumed.centre, plain.centre, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weights(resumed), weights(plain), rtol=1e-12, atol=1e-14)


def test_a_resumed_run_that_can_check_checks(checkpoint):
    strategy = UnifiedStrategy(micro_batch_size=3)
    trained(epochs=2, strategy=strategy, resumed=checkpoint)

    assert "gradients of 8 rows" in strategy.plan.reasons["loss_weight"]


def test_what_was_found_under_another_declaration_does_not_count(checkpoint):
    strategy = UnifiedStrategy(micro_batch_size=1, micro_batches=MicroBatchRules(loss_weight=len))
    trained(epochs=2, strategy=strategy, memory=1, resumed=checkpoint)

    assert "loss_weight, unchecked" in strategy.plan.reasons["loss_weight"]


def test_a_run_that_never_could_check_says_what_is_written_unchecked(caplog):
    trained(epochs=1, strategy=UnifiedStrategy(micro_batch_size=1), memory=1)

    said = [record.message for record in caplog.records if "once a micro-batch" in record.message]
    assert any("Keeps.steps" in one for one in said)
    assert len(said) == len(set(said))
