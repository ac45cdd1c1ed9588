"""Supervised steps precede steps of rewards; a resumed run continues where it stopped."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_unified.models.causal_lm.supervised import SupervisedLanguageModel
from lightning_unified.models.grpo import RolloutBuffer
from tests.support.grpo.steps import TWO, loader_of, mean_cross_entropy, splitting, weights_of
from tests.support.grpo.training import (
    Dice,
    Gradients,
    fit,
    grpo,
    policy,
    traces,
)
from tests.support.lanes import first_cells


class _Supervised(SupervisedLanguageModel):
    def configure_optimizers(self):
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad])


@first_cells(1, "build", [grpo, _Supervised])
def test_supervised_steps_minimise_the_mean_cross_entropy_of_labelled_tokens(build):
    model = policy(adapters=True)
    plain = copy.deepcopy(model).double()
    module, seen = build(model), Gradients()
    fit(module, loader_of([traces()]), steps=1, strategy=splitting(1), callbacks=[seen])
    mean_cross_entropy(plain, traces()).backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(seen.steps[0][name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_after_the_supervised_phase_the_policy_is_the_reference_and_adam_is_fresh():
    class After(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                weights.append(weights_of(pl_module))

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            counts.append({int(state["step"]) for state in optimizer.state.values()})

    weights, counts = [], []
    module = grpo(policy(adapters=True), beta=0.5)
    fit(module, loader_of([traces(), traces(seed=2), *TWO]), steps=4, callbacks=[After()])
    assert counts == [set(), {1}, set(), {1}]
    assert module.reference.kind == "copy"
    with module.reference.on(module.policy):
        assert torch.equal(weights_of(module), weights[0])
    assert not torch.equal(weights_of(module), weights[0])


def test_each_phase_has_its_own_rate():
    class Rates(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates = []
    settings = {
        "sft_steps": 2,
        "sft_learning_rate": 1e-3,
        "learning_rate": 1e-4,
        "warmup_steps": 1,
        "schedule": "linear",
    }
    fit(grpo(**settings), loader_of([traces(), traces(), *TWO]), steps=4, callbacks=[Rates()])
    assert rates == pytest.approx([5e-4, 1e-3, 5e-5, 1e-4])


@first_cells(1, "stopped", [1, 2])
def test_a_resumed_run_is_one_that_was_not_stopped(tmp_path, stopped):
    """Stopped after the supervised step, and between two iterations on the same completions."""

    def run(steps, **options):
        module = grpo(
            policy(adapters=True), beta=0.2, inner_iterations=3, sampler=options.pop("sampler", None) or Dice()
        )
        loader = RolloutBuffer(_Resumable([traces(), *TWO]), inner_iterations=3)
        # Lightning loads a checkpoint before it makes the module float64, in float32
        fit(module.double(), loader, steps=steps, precision="32-true", **options)
        return module

    straight = run(7)
    saver = ModelCheckpoint(dirpath=tmp_path, filename="stopped", every_n_train_steps=stopped)
    half = run(stopped, callbacks=[saver], enable_checkpointing=True)
    resumed = run(7, ckpt_path=tmp_path / "stopped.ckpt", sampler=half.sampler)
    assert resumed.sampler.calls == 2
    torch.testing.assert_close(weights_of(resumed), weights_of(straight), rtol=0, atol=0)


class _Resumable:
    """A loader that knows its place."""

    def __init__(self, batches):
        self.batches, self.place, self.supervised_batches = batches, 0, 1

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]
