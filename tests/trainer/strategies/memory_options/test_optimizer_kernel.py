"""`UnifiedStrategy(optimizer_kernel=…)` acts from the first step on.

No checkpoint has it, and the end of the fit undoes it.
"""

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import ConfigurationError
from lightning_unified.options import kernel_of


class Boring(BoringModel):
    def __init__(self, make=torch.optim.AdamW, **options):
        super().__init__()
        self.make, self.options, self.kernels = make, options, []

    def configure_optimizers(self):
        return self.make(self.parameters(), **self.options)

    def on_before_optimizer_step(self, optimizer):
        self.kernels.append(kernel_of(optimizer))


def fit(module, kernel, *, callbacks=()):
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(optimizer_kernel=kernel),
        callbacks=list(callbacks),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(1)
    trainer.fit(module)
    return trainer


def flags(groups):
    return [(group["foreach"], group["fused"]) for group in groups]


class Notes(L.Callback):
    """Notes the reasons of the plan, and what a checkpoint holds."""

    def on_train_batch_end(self, trainer, *_):
        self.reasons = dict(trainer.strategy.plan.reasons)
        self.saved = flags(trainer._checkpoint_connector.dump_checkpoint()["optimizer_states"][0]["param_groups"])


@pytest.mark.parametrize("built", [{}, {"foreach": True}], ids=str)
def test_a_kernel_that_is_named_runs_whatever_was_built_and_is_undone(built):
    module, notes = Boring(**built), Notes()
    trainer = fit(module, "fused", callbacks=[notes])

    assert module.kernels == ["fused", "fused"]
    assert notes.reasons["optimizer_kernel"] == "fused, as asked"
    assert flags(trainer.optimizers[0].param_groups) == notes.saved == [(built.get("foreach"), None)]


def test_keep_leaves_optimizers_as_they_were_built_and_says_nothing():
    module, notes = Boring(fused=True), Notes()
    fit(module, "keep", callbacks=[notes])

    assert module.kernels == ["fused", "fused"]
    assert "optimizer_kernel" not in notes.reasons


def test_auto_waits_for_a_plan():
    module = Boring()

    class Plans(L.Callback):
        def on_train_start(self, trainer, module):
            memory_options = trainer.strategy.policy.applied_options
            assert memory_options.kernel_choices() == ("fused", "foreach", "for-loop")
            memory_options.set_kernel("fused", why="as planned")

    fit(module, "auto", callbacks=[Plans()])

    assert module.kernels == ["fused", "fused"]


def test_an_optimizer_that_cannot_run_with_it_is_refused_before_the_first_step():
    module = Boring(torch.optim.RMSprop)
    with pytest.raises(ConfigurationError, match=r'optimizer_kernel="fused": RMSprop on cpu cannot run with it'):
        fit(module, "fused")

    assert module.kernels == []
