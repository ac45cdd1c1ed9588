"""One sampler serves a module, and what it keeps is counted."""

import copy
from types import SimpleNamespace

import pytest
import torch

from lightning_unified.models.grpo import GRPO
from lightning_unified.models.grpo import module as grpo_module
from lightning_unified.models.grpo.rollout.sampling_module import spare_bytes
from tests.support.grpo.training import (
    grpo,
    prompts,
)


def test_one_sampler_serves_all_temperatures():
    module = grpo(sampler=None)
    first = module.sampler
    module.temperature = 0.3
    batch = module.prepare_batch(prompts())
    gap = module.score(batch)[0] - batch["sampled_log_probs"]

    assert module.sampler is first
    assert float(gap[batch["mask"]].abs().max()) < 1e-4


def test_a_copy_of_a_module_samples_from_its_own_policy():
    module = grpo()
    copied = copy.deepcopy(module)

    assert module.sampler is not copied.sampler
    assert copied.sampler._model is copied.policy


def test_what_the_sampler_keeps_is_counted_and_given_back(monkeypatch):
    monkeypatch.setattr(grpo_module, "spare_bytes", lambda _module: 2**30)
    module = grpo(sampler=None)
    module.prepare_batch(prompts())
    kept = module.kept_bytes
    module.give_back()

    assert kept > 0
    assert module.kept_bytes == 0


@pytest.mark.parametrize(
    ("device", "strategy", "spare"),
    [
        ("cuda", SimpleNamespace(spare_bytes=7), 7),
        ("cuda", SimpleNamespace(), None),
        ("cpu", SimpleNamespace(spare_bytes=7), None),
    ],
)
def test_the_sampler_may_keep_what_the_plan_leaves_where_there_are_graphs(monkeypatch, device, strategy, spare):
    module = grpo(sampler=None)
    monkeypatch.setattr(GRPO, "device", torch.device(device))
    module._trainer = SimpleNamespace(strategy=strategy)

    assert spare_bytes(module) == spare
