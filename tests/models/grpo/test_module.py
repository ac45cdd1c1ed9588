"""GRPO under a Trainer equals the plain algorithm to rounding, whole and split.

Tests also cover its phases, retries and checkpoints.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy, predict
from lightning_unified.models.grpo import GRPO, RolloutBuffer, outline
from lightning_unified.models.grpo import module as grpo_module
from lightning_unified.models.grpo.optimizer import Rates
from lightning_unified.models.grpo.supervised import SupervisedPolicy
from tests.support.grpo.plain import train
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
from tests.support.lasting import Lasting

TWO = [prompts(), prompts(first=4, seed=5)]


class _Logged(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class _Fails(Callback):
    """Runs out of memory once, in the forward pass of a step that has prepared its batch."""

    raised = Lasting()

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            handle = pl_module.policy.model.layers[-1].register_forward_hook(lambda *_: self._raise(pl_module, handle))

    def _raise(self, module, handle):
        if torch.is_grad_enabled():
            handle.remove()
            self.raised += 1
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
            )


def _loader(batches, *, inner=1):
    loader = DataLoader(batches, batch_size=None)
    return loader if inner == 1 else RolloutBuffer(loader, inner_iterations=inner)


def _cut(size):
    return UnifiedStrategy(micro_batch_size=size, predict=False)


def _weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.policy.parameters()])


def _cross_entropy(model, *batches):
    logits = [model(input_ids=batch["tokens"]).logits[:, :-1].flatten(0, 1) for batch in batches]
    labels = [batch["labels"][:, 1:].flatten() for batch in batches]
    return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))


@pytest.mark.parametrize(("adapters", "size"), [slow(False, 5), slow(True, None), (True, 1)])
def test_gradients_and_losses_are_those_of_the_plain_algorithm(adapters, size):
    """Train in float64, whole without our strategy, or split.

    Runs have padding, the reference term, active clipping and two inner iterations.
    """
    model = policy(adapters=adapters)
    plain, anchor = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    module = grpo(model, inner_iterations=2, clip_low=0.1, clip_high=0.15, beta=0.3)
    seen, logged = Gradients(), _Logged()
    strategy = "auto" if size is None else _cut(size)
    fit(module, _loader(TWO, inner=2), steps=4, strategy=strategy, callbacks=[seen, logged])

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
    torch.testing.assert_close(_weights(module), own, rtol=1e-9, atol=1e-9)


def test_what_is_logged_of_a_cut_batch_is_that_of_the_whole():
    runs = []
    for size in (None, 3):
        module = grpo(policy(adapters=True), beta=0.1)
        trainer = fit(module, _loader(TWO), steps=2, strategy="auto" if size is None else _cut(size))
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
    for fails in (_Fails(1), _Fails(-1)):
        module = grpo(policy(adapters=True), beta=0.1, sampler=Dice())
        strategy = UnifiedStrategy(micro_batch_size=4, predict=False)
        fit(module, _loader(TWO), steps=2, strategy=strategy, callbacks=[fails])
        runs.append((module, fails.raised))
    (failed, raised), (calm, _) = runs
    assert raised == 1
    assert failed.sampler.calls == calm.sampler.calls == 2
    torch.testing.assert_close(_weights(failed), _weights(calm), rtol=1e-9, atol=1e-9)


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
    trainer = fit(module, _loader([prompts()] * 6), steps=6)
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    assert limits[0] == 48
    assert limits[-1] < 48
    assert float(trainer.callback_metrics["train/budget"]) == limits[-1]
    resumed = grpo(sampler=Short(), **settings)
    fit(resumed, _loader([prompts()] * 7), steps=7, ckpt_path=tmp_path / "six.ckpt")
    assert limits[6] == limits[5]


def test_nothing_is_learnt_where_no_group_tells_anything():
    module = grpo(learning_rate=0.1)
    batch = prompts()
    batch["example"] = torch.full((4,), 2)
    before = _weights(module).double()
    fit(module, _loader([batch, batch]), steps=2, strategy=_cut(3))
    assert torch.equal(_weights(module), before)


def _supervised(model):
    rates = {
        "sft_steps": 0,
        "sft_learning_rate": 1e-4,
        "learning_rate": 1e-2,
        "weight_decay": 0.0,
        "betas": (0.9, 0.99),
    }
    return SupervisedPolicy(
        model, rates=Rates(**rates, eps=1e-8, warmup_steps=0, schedule="constant", optimizer_kernel="auto")
    )


@pytest.mark.parametrize("build", [grpo, _supervised])
def test_supervised_steps_minimise_the_mean_cross_entropy_of_labelled_tokens(build):
    model = policy(adapters=True)
    plain = copy.deepcopy(model).double()
    module, seen = build(model), Gradients()
    fit(module, _loader([traces()]), steps=1, strategy=_cut(1), callbacks=[seen])
    _cross_entropy(plain, traces()).backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(seen.steps[0][name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_after_the_supervised_phase_the_policy_is_the_reference_and_adam_is_fresh():
    class After(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                weights.append(_weights(pl_module))

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            counts.append({int(state["step"]) for state in optimizer.state.values()})

    weights, counts = [], []
    module = grpo(policy(adapters=True), beta=0.5)
    fit(module, _loader([traces(), traces(seed=2), *TWO]), steps=4, callbacks=[After()])
    assert counts == [set(), {1}, set(), {1}]
    assert module.reference.kind == "copy"
    with module.reference.on(module.policy):
        assert torch.equal(_weights(module), weights[0])
    assert not torch.equal(_weights(module), weights[0])


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
    fit(grpo(**settings), _loader([traces(), traces(), *TWO]), steps=4, callbacks=[Rates()])
    assert rates == pytest.approx([5e-4, 1e-3, 5e-5, 1e-4])


@pytest.mark.parametrize("stopped", [1, 2])
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
    torch.testing.assert_close(_weights(resumed), _weights(straight), rtol=0, atol=0)


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


def test_a_window_of_batches_is_normalised_by_all_its_tokens():
    model = policy()
    plain, both = copy.deepcopy(model).double(), [traces(), traces(seed=2)]
    both[1]["labels"][:2] = -100
    module, seen = grpo(model), Gradients()
    strategy = UnifiedStrategy(micro_batch_size=2, predict=False, window_mean="terms")
    fit(module, _loader(both), steps=1, strategy=strategy, callbacks=[seen], accumulate_grad_batches=2)
    _cross_entropy(plain, *both).backward()
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
    trainer = fit(module, _loader(TWO), steps=2, val=_loader([prompts(), traces()]))
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
    trainer = fit(module, _loader(TWO), steps=1, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "built.ckpt")
    again = Built.load_from_checkpoint(tmp_path / "built.ckpt", weights_only=True)
    assert again.hparams == {"policy": "small", "betas": (0.8, 0.9)}
    torch.testing.assert_close(_weights(again).double(), _weights(module))


def test_one_sampler_serves_all_temperatures():
    module = grpo(sampler=None)
    first = module.sampler
    module.temperature = 0.3
    batch = module.prepare_batch(prompts())
    gap = module.score(batch, temperature=0.3)[0] - batch["sampled_log_probs"]

    assert module.sampler is first
    assert float(gap[batch["mask"]].abs().max()) < 1e-4


def test_a_copy_of_a_module_samples_from_its_own_policy():
    module = grpo()
    copied = copy.deepcopy(module)

    assert module.sampler is not copied.sampler
    assert copied.sampler._model is copied.policy


def test_what_the_sampler_keeps_is_counted_and_given_back(monkeypatch):
    monkeypatch.setattr(grpo_module, "_spare_bytes", lambda _module: 2**30)
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

    assert grpo_module._spare_bytes(module) == spare


def test_a_policy_learns_from_rewards_what_each_prompt_asks_for():
    class SameParity(Task):
        def rewards(self, examples, completions, *, step=0):
            right = [int(text) % 2 == number % 2 for text, number in zip(completions, examples.tolist(), strict=True)]
            return {"total": torch.tensor(right, dtype=torch.float32)}

    asked = torch.randint(VOCABULARY, (30, 16, 1), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(16, 1, dtype=torch.bool)
    batches = [{"prompt": one, "prompt_mask": mask, "example": one[:, 0]} for one in asked]
    settings = {"group_size": 8, "max_new_tokens": 1, "learning_rate": 1e-2}
    module, logged = GRPO(policy(), task=SameParity(), decode=decode, stop_ids=[0], **settings), _Logged()
    torch.manual_seed(0)
    fit(module, _loader(batches), steps=30, strategy=_cut(48), precision="32-true", callbacks=[logged])
    rewards = [step["train/reward"] for step in logged.steps]

    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-5:]) / 5 > 0.85


@pytest.mark.slow
def test_the_policy_learns_what_is_paid():
    class Even(Task):
        def rewards(self, examples, completions, *, step=0):
            shares = [sum(int(word) % 2 == 0 for word in text.split()) / 4 for text in completions]
            return {"total": torch.tensor(shares)}

    model, logged = policy(adapters=True), _Logged()
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
    fit(module, _loader(batches), steps=60, strategy=_cut(12), precision="32-true", callbacks=[logged])
    rewards = [step["train/reward"] for step in logged.steps]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.2
    assert max(step["train/sampling_gap"] for step in logged.steps) < 1e-5
