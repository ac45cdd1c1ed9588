"""GRPO under a Trainer: the plain algorithm to rounding, however batches are cut, and its phases, retries and checkpoints."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.models.grpo import RolloutBuffer
from tests.models.grpo import rival
from tests.models.grpo.conftest import Gradients, fit, grpo, policy, prompts, traces


class _Logged(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def _loader(batches, *, inner=1):
    loader = DataLoader(batches, batch_size=None)
    return loader if inner == 1 else RolloutBuffer(loader, inner_iterations=inner)


def _strategy(size):
    return "auto" if size is None else UnifiedStrategy(micro_batch_size=size, predict=False)


@pytest.mark.parametrize("size", [None, 1, 5, 12])
@pytest.mark.parametrize("adapters", [False, True])
def test_gradients_and_losses_are_those_of_the_plain_algorithm(size, adapters):
    """With padding, the reference term, clipping that bites and two inner iterations, in float64."""
    limits = {"low": 0.1, "high": 0.15, "beta": 0.3}
    batches = [prompts(), prompts(first=4, seed=5)]
    model = policy(adapters=adapters)
    plain, anchor = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    module = grpo(model, inner_iterations=2, clip_low=0.1, clip_high=0.15, beta=0.3)
    seen, logged = Gradients(), _Logged()
    fit(module, _loader(batches, inner=2), steps=4, strategy=_strategy(size), callbacks=[seen, logged])

    gradients, losses, shares = rival.train(
        plain,
        anchor,
        module.sampler.given,
        [batch["example"] for batch in batches],
        inner=2,
        learning_rate=1e-2,
        **limits,
    )
    assert shares[0] == shares[2] == 0
    assert min(shares[1], shares[3]) > 0.1  # clipping bites
    assert len(seen.steps) == 4
    for ours, theirs, step, loss, share in zip(seen.steps, gradients, logged.steps, losses, shares, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert float((ours[name] - gradient).norm()) <= 1e-10 * float(gradient.norm() + 1e-12), name
        assert step["train/loss"] == pytest.approx(loss, rel=1e-6, abs=1e-7)  # logged in float32
        assert step["train/clipped"] == pytest.approx(share, abs=1e-6)
    for ours, theirs in zip(module.policy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
