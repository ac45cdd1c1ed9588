"""Compressor under a Trainer: exact when split and resumed.

Tests cover its price, its collapse and its checkpoint.
"""

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.models.compressor import Compressor
from lightning_unified.models.compressor.objective.rate import CollapseWatch, Price
from lightning_unified.options import recompute_policies
from tests.support.lanes import first_cells, slow


class _Data(LightningDataModule):
    def __init__(self, batches, tokenizer=None):
        super().__init__()
        self.batches = batches
        if tokenizer is not None:
            self.tokenizer = tokenizer

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    def val_dataloader(self):
        return DataLoader(self.batches, batch_size=None)


class _Seeds(Callback):
    """The same random numbers in each batch, whatever was drawn before."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.manual_seed(100 + trainer.global_step)


def _fit(model, batches, directory, *, tokenizer=None, ckpt_path=None, callbacks=(), **options):
    quiet = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "max_steps": 3,
        "limit_val_batches": 0,
    }
    trainer = Trainer(default_root_dir=directory, callbacks=[_Seeds(), *callbacks], **{**quiet, **options})
    trainer.fit(model, _Data(batches, tokenizer), ckpt_path=ckpt_path, weights_only=None)
    return trainer


def _weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture
def tokenizer():
    return Tokenizer(models.WordLevel({f"w{index}": index for index in range(300)}, unk_token="w0"))


@pytest.mark.parametrize("objective", [slow("reinforce"), "relaxed"])
def test_training_in_micro_batches_is_training_whole(build, batch, tmp_path, objective):
    runs = []
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=2, predict=False)):
        model = build(objective=objective, schedule="constant")
        trainer = _fit(model, [batch] * 3, tmp_path, strategy=strategy, precision="64-true")
        runs.append((_weights(model), model.price.value, trainer.callback_metrics))
    (whole, price, metrics), (parts, parts_price, parts_metrics) = runs

    assert (parts - whole).norm() <= 1e-12 * whole.norm()
    torch.testing.assert_close(parts_price, price, rtol=1e-12, atol=0)
    assert price != model.price.integral  # a batch has moved it
    for name in ("train/loss", "train/distortion", "train/language_loss", "train/keep_ratio", "train/price"):
        assert float(parts_metrics[name]) == pytest.approx(float(metrics[name]), rel=1e-6), name


def test_a_resumed_run_pays_the_price_and_ends_with_an_unstopped_runs_weights(build, batch, tmp_path):
    """The checkpoint is written at the end of a batch.

    It must contain the price of the next batch.
    """
    batches = [batch] * 4
    straight = build(schedule="constant")
    _fit(straight, batches, tmp_path, max_steps=4)
    saver = ModelCheckpoint(dirpath=tmp_path, filename="two", every_n_train_steps=2)
    _fit(build(schedule="constant"), batches, tmp_path, max_steps=2, callbacks=[saver])
    resumed = build(schedule="constant", price=0.1)
    _fit(resumed, batches, tmp_path, max_steps=4, ckpt_path=tmp_path / "two.ckpt")

    assert torch.equal(resumed.price.value, straight.price.value)
    assert torch.equal(_weights(resumed), _weights(straight))


def test_the_price_moves_towards_the_target_and_never_below_zero():
    price = Price(target=0.5, start=1.0, rate=0.5, damping=2.0)
    price.update(torch.tensor(0.7))
    assert (price.integral.item(), price.value.item()) == pytest.approx((1.1, 1.5))
    price.update(torch.tensor(0.4))
    assert (price.integral.item(), price.value.item()) == pytest.approx((1.05, 0.85))
    for _ in range(10):
        price.update(torch.tensor(0.0))
    assert (price.integral.item(), price.value.item()) == (0.0, 0.0)


@pytest.mark.slow
def test_the_price_holds_the_target_against_a_policy_that_follows_its_gradient():
    """Of 400 tokens worth 0 to 4 nats, a policy of one free logit each keeps the stated share."""
    worth, entropy = torch.linspace(0, 4, 400), 0.5
    for target in (0.3, 0.7):
        price, logits = Price(target=target, start=7.0, rate=0.2, damping=5.0), torch.zeros(400, requires_grad=True)
        optimizer = torch.optim.Adam([logits], lr=0.1)
        for _ in range(400):
            chance = torch.sigmoid(logits)
            bonus = torch.nn.functional.softplus(logits) - logits * chance
            loss = ((price.value - worth) * chance - entropy * bonus).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            price.update(torch.sigmoid(logits).mean().detach())

        assert torch.sigmoid(logits).mean().item() == pytest.approx(target, abs=0.02)
        assert (logits.detach().diff() > 0).float().mean() > 0.9  # and it ranks tokens by their worth


@first_cells(
    1,
    ("bias", "scale", "words"),
    [(30.0, 0.0, "keeps every token"), (-30.0, 0.0, "drops every token"), (0.0, 0.0, "the same chance")],
)
def test_a_collapsed_policy_is_reported_once(build, batch, tmp_path, bias, scale, words):
    model = build(collapse_patience=2, policy_learning_rate=1e-12)
    with torch.no_grad():
        model.codec.policy.head[-1].weight.mul_(scale)
        model.codec.policy.head[-1].bias.fill_(bias)
    with pytest.warns(UserWarning, match=f"the policy has collapsed.*{words}") as warned:
        _fit(model, [batch] * 25, tmp_path, max_steps=25)

    assert sum(words in str(one.message) for one in warned) == 1


def test_a_healthy_policy_is_not_called_collapsed(build, batch, tmp_path, recwarn):
    _fit(build(collapse_patience=2), [batch] * 11, tmp_path, max_steps=11)

    assert [one for one in recwarn if "collapsed" in str(one.message)] == []


def test_a_streak_that_ends_begins_anew():
    watch = CollapseWatch(patience=2)
    for ratio in (1.0, 0.5, 1.0):
        watch.update(ratio=torch.tensor(ratio), spread=torch.tensor(0.1))
    assert watch.found() == []
    watch.update(ratio=torch.tensor(1.0), spread=torch.tensor(0.1))
    assert watch.found() == ["keeps every token: nothing is compressed"]


def test_validation_scores_dropped_tokens_at_exactly_the_target(build, batch, tmp_path):
    model = build(keep_ratio=0.25)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    metrics = trainer.validate(model, _Data([batch, batch]), verbose=False)[0]
    ids, mask = batch["input_ids"], batch["mask"]
    keep = torch.zeros_like(mask)
    for row, logits in enumerate(model.keep_logits(ids, mask)):
        length = int(mask[row].sum())
        best = logits[:length].argsort(descending=True)[: round(0.25 * length)]
        keep[row, best] = True
    losses = -model.reconstruct(ids, keep, mask).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    assert metrics["val/loss"] == pytest.approx(losses[mask & ~keep].mean().item(), rel=1e-5)
    assert 0 <= metrics["val/keep_ratio"] <= 1
    assert metrics["val/language_loss"] > 0


def test_policy_and_reader_are_two_groups_of_one_optimizer(build, batch, tmp_path):
    model = build(policy_learning_rate=3e-4, learning_rate=1e-4, schedule="constant", policy_weight_decay=0.5)
    trainer = _fit(model, [batch] * 2, tmp_path, max_steps=2)
    policy, reader = trainer.optimizers[0].param_groups

    assert len(trainer.optimizers) == 1
    assert (policy["lr"], reader["lr"], policy["weight_decay"]) == (3e-4, 1e-4, 0.5)
    assert sum(p.numel() for p in policy["params"]) == 7_441
    assert sum(p.numel() for p in reader["params"]) == 28_800 + 2 * 32


def test_a_checkpoint_is_plain_data_and_restores_everything(build, batch, tokenizer, tmp_path):
    model = build()
    trainer = _fit(model, [batch], tmp_path, max_steps=1, tokenizer=tokenizer)
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    torch.load(tmp_path / "m.ckpt", weights_only=True)
    again = Compressor.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=True)

    assert again.tokenizer.encode("w7") == [7]
    assert again.tokenizer == model.tokenizer
    assert again.config == model.config
    assert torch.equal(again.price.value, model.float().price.value)
    assert torch.equal(again(batch["input_ids"], batch["mask"]), model(batch["input_ids"], batch["mask"]))


def test_a_checkpoint_of_other_sizes_or_of_something_else_is_refused(build):
    checkpoint = {}
    build().on_save_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=r"layers 2 \(here 1\)"):
        build(layers=1).on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="not one of Compressor"):
        build().on_load_checkpoint({"state_dict": {}})


def test_a_tokenizer_that_does_not_fit_is_refused(build, tokenizer):
    with pytest.raises(ValueError, match="the tokenizer has 300 tokens, the model's vocabulary is 200"):
        build(vocabulary=200).attach_tokenizer(tokenizer)
    model, other = build(vocabulary=400), Tokenizer.from_str(tokenizer.to_str())
    model.attach_tokenizer(tokenizer)
    other.add_tokens(["engine"])
    with pytest.raises(ValueError, match="another tokenizer"):
        model.attach_tokenizer(other)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"text_length": 33}, "text_length=33, and the policy has positions for 32 tokens; lower it"),
        ({"text_length": 16, "continuation_length": 0}, r"set data\.continuation_length above 0"),
        ({"text_length": 32, "continuation_length": 40}, "need 72 positions, and the reader has 64"),
    ],
)
def test_data_whose_lengths_do_not_fit_is_refused_before_the_first_step(build, batch, tmp_path, sizes, message):
    data = _Data([batch])
    vars(data).update(sizes)
    with pytest.raises(ValueError, match=message):
        Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path).fit(build(target="predict"), data)


def test_recomputation_can_be_switched_from_outside_and_changes_no_gradient(build, batch, gradients):
    model = build()
    prepared = model.prepare_batch(batch)
    plain = gradients(model, model.training_step(prepared)["loss"])
    model.recompute = True
    again = gradients(model, model.training_step(prepared)["loss"])

    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())
    assert len(recompute_policies(model)) > 1


def test_the_loss_is_the_same_in_any_chunk(build, batch):
    model = build()
    prepared = model.prepare_batch(batch)
    whole = model.training_step(prepared)["loss"]
    model.loss_chunk_rows = 7

    torch.testing.assert_close(model.training_step(prepared)["loss"], whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "reinforced"}, "did you mean reinforce"),
        ({"target": "restor"}, "did you mean restore"),
        ({"masks": 1, "objective": "reinforce"}, "masks=1; objective=reinforce needs at least 2"),
        ({"keep_ratio": 1.0}, r"keep_ratio=1\.0 is not a share"),
        ({"temperature": 0.0}, r"temperature=0\.0 must be above 0"),
        ({"price_rate": -1.0}, r"price_rate=-1\.0"),
        ({"policy_learning_rate": 0.0}, r"policy_learning_rate=0\.0 must be above 0"),
        ({"warmup_steps": -1}, "warmup_steps=-1 may not be below 0"),
        ({"collapse_patience": 0}, "collapse_patience=0 is not a number of batches"),
        ({"entropy_weight": -0.1}, r"entropy_weight=-0\.1 may not be below 0"),
        ({"budget_range": -1.0}, r"budget_range=-1\.0 may not be below 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(build, change, message):
    with pytest.raises(ValueError, match=message):
        build(**change)
