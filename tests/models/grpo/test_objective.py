"""Advantages and the loss alone: values, sums, and content of padding."""

import pytest
import torch

from lightning_unified.models.grpo.batches.rollouts import group_advantages, informative_groups
from lightning_unified.models.grpo.objective import Objective, kl_to_reference

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)


def _batch(*, rows=6, width=5):
    generator = torch.Generator().manual_seed(0)
    now, old, reference = (torch.randn(rows, width, generator=generator, dtype=torch.float64) - 2 for _ in range(3))
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    return {
        "log_probs": now.requires_grad_(),
        "old": old,
        "reference": reference,
        "mask": mask,
        "advantages": advantages,
    }


def _rows(batch, start, stop):
    return {name: value[start:stop] for name, value in batch.items()}


def test_advantages_are_centred_in_their_group():
    assert group_advantages(REWARDS, group_size=4).tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]


def test_advantages_may_be_divided_by_their_groups_deviation():
    found = group_advantages(REWARDS, group_size=4, scale="group")
    assert found[0] == pytest.approx(0.5 / (REWARDS[:4].std().item() + 1e-4))
    assert not found[4:].any()


def test_a_group_tells_nothing_whose_rewards_are_the_same_but_for_rounding():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.0, 0.01], dtype=torch.float64)
    assert informative_groups(rewards, group_size=2).tolist() == [False, True]


def test_the_losses_of_micro_batches_add_up():
    objective, batch = Objective(clip_low=0.1, clip_high=0.3, beta=0.2), _batch()
    total = int(batch["mask"].sum())
    whole = objective(**batch, total=total)
    parts = [objective(**_rows(batch, start, stop), total=total) for start, stop in ((0, 1), (1, 4), (4, 6))]
    for name in ("loss", "kl", "clipped"):
        torch.testing.assert_close(sum(getattr(part, name) for part in parts), getattr(whole, name))


def test_a_ratio_outside_its_limits_has_no_gradient_where_it_would_go_further():
    objective = Objective(clip_low=0.1, clip_high=0.3)
    log_probs = torch.tensor([[0.5, -0.5], [0.5, -0.5]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool)
    terms = objective(log_probs, mask=mask, advantages=torch.tensor([1.0, -1.0]), total=4, old=old)
    terms.loss.backward()
    assert (log_probs.grad != 0).tolist() == [[False, True], [True, False]]
    assert float(terms.clipped) == 0.5


def test_what_pads_hold_does_not_matter():
    objective, batch = Objective(beta=0.2), _batch()
    mask, total = batch["mask"], int(batch["mask"].sum())
    worse = {
        name: batch[name].detach().masked_fill(~mask, value) for name, value in (("log_probs", 400.0), ("old", -400.0))
    }
    worse["log_probs"].requires_grad_()
    expected, found = objective(**batch, total=total).loss, objective(**{**batch, **worse}, total=total).loss
    expected.backward()
    found.backward()
    assert found == expected
    assert torch.equal(worse["log_probs"].grad, batch["log_probs"].grad)


def test_the_divergence_is_never_negative_and_zero_at_the_reference():
    batch = _batch()
    assert float(kl_to_reference(batch["log_probs"].detach(), batch["reference"]).min()) > 0
    assert not kl_to_reference(batch["old"], batch["old"]).any()


def test_a_weight_of_the_divergence_needs_a_reference():
    batch = {**_batch(), "reference": None}
    with pytest.raises(ValueError, match=r"beta=0.2 needs the reference's log-probabilities"):
        Objective(beta=0.2)(**batch, total=1)
