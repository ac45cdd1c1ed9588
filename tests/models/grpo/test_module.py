"""GRPO under a Trainer equals the plain algorithm to rounding, whole and split.

Tests also cover its phases, retries and checkpoints.
"""

import copy
from dataclasses import replace

import pytest
import torch

from lightning_unified import UnifiedStrategy, predict
from lightning_unified.models.grpo import GRPO, outline
from tests.support.grpo.plain import train
from tests.support.grpo.steps import TWO, Fails, Logged, loader_of, mean_cross_entropy, splitting, weights_of
from tests.support.grpo.training import (
    VOCABULARY,
    Dice,
    Gradients,
    Plain,
    Task,
    decode,
    fit,
    grpo,
    policy,
    prompts,
    traces,
)
from tests.support.lanes import slow


@pytest.mark.parametrize(("adapters", "size"), [slow(False, 5), slow(True, None), (True, 1)])
def test_gradients_and_losses_are_those_of_the_plain_algorithm(adapters, size):
    """Train in float64, whole without our strategy, or split.

    Runs have padding, the reference term, active clipping and two inner iterations.
    """
    model = policy(adapters=adapters)
    plain, anchor = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    module = grpo(model, inner_iterations=2, clip_low=0.1, clip_high=0.15, beta=0.3)
    seen, logged = Gradients(), Logged()
    strategy = "auto" if size is None else splitting(size)
    fit(module, loader_of(TWO, inner=2), steps=4, strategy=strategy, callbacks=[seen, logged])

    examples = [batch["example"] for batch in TWO]
    settings = {"inner": 2, "learning_rate": 1e-2, "low": 0.1, "high": 0.15, "beta": 0.3}
    gradients, losses, shares = train(plain, anchor, module.sampler.given, examples, **settings)
    assert shares[0] == shares[2] == 0
    assert min(shares[1], shares[3]) > 0.1  # clipping bites
    assert len(seen.steps) == 4
    for ours, theirs, step, loss, share in zip(seen.steps, gradients, logged.steps, losses, shares, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert float((ours[name] - gradient).norm()) <= 1e-10 * float(gradient.norm()) + 1e-15, name
        assert step["train/loss"] == pytest.approx(loss, rel=1e-10, abs=1e-12)
        assert step["train/clipped"] == pytest.approx(share)
    own = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    torch.testing.assert_close(weights_of(module), own, rtol=1e-9, atol=1e-9)


def test_logged_shares_are_summed_even_where_rounding_makes_them():
    logged = Logged()
    module = grpo(policy(adapters=True), beta=0.1)
    fit(module, loader_of(TWO), steps=1, callbacks=[logged])
    shares = {
        name
        for name in logged.steps[0]
        if name.removeprefix("train/") in ("loss", "clipped", "entropy", "kl", "sampling_gap")
    }

    assert len(shares) == 5
    assert {name: module.configure_micro_batches("fit").merge.logs.get(name) for name in shares} == dict.fromkeys(
        shares, "sum"
    )


@pytest.mark.slow
def test_what_is_logged_of_a_split_batch_is_that_of_the_whole():
    runs = []
    for size in (None, 3):
        module = grpo(policy(adapters=True), beta=0.1)
        trainer = fit(module, loader_of(TWO), steps=2, strategy="auto" if size is None else splitting(size))
        runs.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    whole, cut = runs
    assert {
        "train/reward",
        "train/reward_even",
        "train/reward_small",
        "train/kl",
        "train/entropy",
        "train/length",
    } <= set(cut)
    assert cut == pytest.approx(whole, rel=1e-6)
    assert cut["train/dropped_groups"] == 0.25  # prompt 5 of 4 to 7 pays nothing to anybody


def test_completions_are_sampled_once_for_a_step_that_is_repeated():
    runs = []
    for fails in (Fails(1), Fails(-1)):
        module = grpo(policy(adapters=True), beta=0.1, sampler=Dice())
        strategy = UnifiedStrategy(micro_batch_size=4, predict=False)
        fit(module, loader_of(TWO), steps=2, strategy=strategy, callbacks=[fails])
        runs.append((module, fails.raised))
    (failed, raised), (calm, _) = runs
    assert raised == 1
    assert failed.sampler.calls == calm.sampler.calls == 2
    torch.testing.assert_close(weights_of(failed), weights_of(calm), rtol=1e-9, atol=1e-9)


def test_the_rows_of_a_batch_are_completions_that_teach_something():
    module = grpo()
    module.prepare_batch(prompts())  # the first is the largest there can be
    batch = module.prepare_batch(prompts())
    rows = len(batch["tokens"])
    assert rows == 12  # of 16: prompt 2 pays nothing to anybody
    assert batch["tokens"].shape[1] == int((batch["start"] + batch["mask"].sum(1)).max())
    assert {len(value) for value in batch.values() if isinstance(value, torch.Tensor)} == {rows}
    assert batch["total"] == int(batch["mask"].sum())
    assert module.prepare_batch(batch)["tokens"] is batch["tokens"]  # a prepared batch is left as it is
    assert float(batch["advantages"].unflatten(0, (3, 4)).sum(1).abs().max()) < 1e-12


def test_the_first_batch_is_the_largest_there_can_be_and_teaches_the_same():
    module = grpo()
    batch = module.prepare_batch(prompts())
    largest = outline(4, prompt_length=6, group_size=4, max_new_tokens=7)
    for name, value in largest.items():
        if isinstance(value, torch.Tensor):
            assert batch[name].shape == value.shape, name
    assert batch["mask"].any(1).tolist() == [True] * 12 + [False] * 4


def test_an_automatic_budget_follows_completions_that_end_and_survives_a_stop(tmp_path):
    class Short(Dice):
        def __call__(self, prompt, prompt_mask, options):
            limits.append(options.max_new_tokens)
            return super().__call__(prompt, prompt_mask, replace(options, max_new_tokens=4))

    limits, settings = [], {"max_new_tokens": 48, "completion_budget": "auto"}
    module = grpo(sampler=Short(), **settings)
    trainer = fit(module, loader_of([prompts()] * 6), steps=6)
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    assert limits[0] == 48
    assert limits[-1] < 48
    assert float(trainer.callback_metrics["train/budget"]) == limits[-1]
    resumed = grpo(sampler=Short(), **settings)
    fit(resumed, loader_of([prompts()] * 7), steps=7, ckpt_path=tmp_path / "six.ckpt")
    assert limits[6] == limits[5]


def test_nothing_is_learnt_where_no_group_tells_anything():
    module = grpo(learning_rate=0.1)
    batch = prompts()
    batch["example"] = torch.full((4,), 2)
    before = weights_of(module).double()
    fit(module, loader_of([batch, batch]), steps=2, strategy=splitting(3))
    assert torch.equal(weights_of(module), before)


def test_a_window_of_batches_is_normalised_by_all_its_tokens():
    model = policy()
    plain, both = copy.deepcopy(model).double(), [traces(), traces(seed=2)]
    both[1]["labels"][:2] = -100
    module, seen = grpo(model), Gradients()
    strategy = UnifiedStrategy(micro_batch_size=2, predict=False, window_mean="terms")
    fit(module, loader_of(both), steps=1, strategy=strategy, callbacks=[seen], accumulate_grad_batches=2)
    mean_cross_entropy(plain, *both).backward()
    for name, parameter in plain.named_parameters():  # whose norms are computed in float32
        assert float((seen.steps[0][name] - parameter.grad).norm()) < 1e-6 * float(parameter.grad.norm()), name


def test_a_step_is_planned_from_shapes_alone_and_nothing_is_sampled():
    module = grpo(policy(adapters=True), beta=0.1)
    with torch.device("meta"):
        shapes = {name: torch.empty_like(value, device="meta") for name, value in prompts().items()}
        found = module.prepare_batch(shapes)
    assert found["tokens"].shape == (16, 13)
    largest = outline(4, prompt_length=6, group_size=4, max_new_tokens=7)
    assert predict(module, largest, device="cuda", micro_batch_size=4).confidence == "high"
    assert module.sampler.calls == 0
    assert module.reference.kind == "none"


def test_validation_logs_rewards_of_prompts_and_the_loss_of_traces():
    module = grpo()
    trainer = fit(module, loader_of(TWO), steps=2, val=loader_of([prompts(), traces()]))
    assert {"val/reward", "val/reward_even", "val/loss"} <= set(trainer.callback_metrics)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_size": 1}, "group_size=1; give 2 or more"),
        ({"scale_rewards": "grop"}, "did you mean group"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"clip_low": 1.5}, "clip_low=1.5; give more than 0 and at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        grpo(**options)


def test_inner_iterations_need_a_loader_that_numbers_them():
    with pytest.raises(ValueError, match="put the loader into RolloutBuffer"):
        grpo(inner_iterations=2).prepare_batch(prompts())


def test_rewards_that_are_not_one_a_completion_are_refused():
    module = grpo()
    module.task.rewards = lambda examples, completions, step=0: {"total": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"gave total \(3,\); it must give one number for each of the 16 completions"):
        module.prepare_batch(prompts())


def test_rewards_that_are_no_numbers_are_refused():
    module = grpo()
    module.task.rewards = lambda examples, completions, step=0: {"total": torch.full((16,), torch.nan)}
    with pytest.raises(ValueError, match="gave total values that are infinite or no numbers"):
        module.prepare_batch(prompts())


def test_a_subclass_that_builds_its_policy_has_its_values_in_the_checkpoint(tmp_path):
    make = policy

    class Built(GRPO):
        def __init__(self, *, policy="tiny", betas=(0.9, 0.99)):
            super().__init__(
                make(), task=Task(), decode=decode, sampler=Dice(), group_size=4, max_new_tokens=7, betas=betas
            )

    module = Built(policy="small", betas=[0.8, 0.9])
    trainer = fit(module, loader_of(TWO), steps=1, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "built.ckpt")
    again = Built.load_from_checkpoint(tmp_path / "built.ckpt", weights_only=True)
    assert again.hparams == {"policy": "small", "betas": (0.8, 0.9)}
    torch.testing.assert_close(weights_of(again).double(), weights_of(module))


@pytest.mark.slow
def test_a_policy_learns_from_rewards_what_each_prompt_asks_for():
    class SameParity(Task):
        def rewards(self, examples, completions, *, step=0):
            right = [int(text) % 2 == number % 2 for text, number in zip(completions, examples.tolist(), strict=True)]
            return {"total": torch.tensor(right, dtype=torch.float32)}

    asked = torch.randint(VOCABULARY, (30, 16, 1), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(16, 1, dtype=torch.bool)
    batches = [{"prompt": one, "prompt_mask": mask, "example": one[:, 0]} for one in asked]
    settings = {"group_size": 8, "max_new_tokens": 1, "learning_rate": 1e-2}
    module, logged = GRPO(policy(), task=SameParity(), decode=decode, stop_ids=[0], **settings), Logged()
    torch.manual_seed(0)
    fit(module, loader_of(batches), steps=30, strategy=splitting(48), precision="32-true", callbacks=[logged])
    rewards = [step["train/reward"] for step in logged.steps]

    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-5:]) / 5 > 0.85


@pytest.mark.slow
def test_the_policy_learns_what_is_paid():
    class Even(Task):
        def rewards(self, examples, completions, *, step=0):
            shares = [sum(int(word) % 2 == 0 for word in text.split()) / 4 for text in completions]
            return {"total": torch.tensor(shares)}

    model, logged = policy(adapters=True), Logged()
    settings = {
        "group_size": 8,
        "max_new_tokens": 4,
        "temperature": 0.7,
        "learning_rate": 1e-2,
        "scale_rewards": "group",
    }
    module = GRPO(model, task=Even(), decode=decode, sampler=Plain(model), **settings)
    torch.manual_seed(0)
    batches = [prompts(seed=seed) for seed in range(60)]
    fit(module, loader_of(batches), steps=60, strategy=splitting(12), precision="32-true", callbacks=[logged])
    rewards = [step["train/reward"] for step in logged.steps]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.2
    assert max(step["train/sampling_gap"] for step in logged.steps) < 1e-5
