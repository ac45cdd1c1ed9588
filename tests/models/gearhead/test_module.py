"""GearHead's losses, its exactness under cuts, its optimizer, its checkpoint."""

import math

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_unified.models.gearhead.module import GearHead
from lightning_unified.models.training import adamw, decay_groups
from lightning_unified.nn.adamw import kernel_arguments, learning_rate_factor
from lightning_unified.options import LossChunk, recompute_policies


def _trainer(directory, **arguments):
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    return Trainer(accelerator="cpu", default_root_dir=directory, **{**quiet, **arguments})


class _Data(LightningDataModule):
    def __init__(self, batches, tokenizer=None):
        super().__init__()
        self.batches, self.tokenizer = batches, tokenizer

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    def val_dataloader(self):
        return DataLoader(self.batches, batch_size=None)


def _cut(batch, start, stop):
    return {key: value[start:stop] if value.ndim else value for key, value in batch.items()}


def _gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("preset", ["gearhead-small", "gearhead-text"])
def test_gradients_of_micro_batches_add_up_to_those_of_the_whole(build, batch, rows, preset):
    model = build(preset).double()
    whole_loss = model.training_step(batch)
    whole_loss.backward()
    whole = _gradients(model)
    model.zero_grad()
    prepared, parts_loss = model.prepare_batch(batch), 0.0
    for start in range(0, 5, rows):
        loss = model.training_step(_cut(prepared, start, start + rows))
        loss.backward()
        parts_loss += loss.detach()

    torch.testing.assert_close(parts_loss, whole_loss.detach(), rtol=1e-12, atol=0)
    for part, reference in zip(_gradients(model), whole, strict=True):
        assert (part - reference).norm() <= 1e-12 * reference.norm()


def test_the_loss_is_the_shifted_cross_entropy_plus_the_weighted_diagnosis(build, batch):
    model = build(diagnosis_weight=0.3).double()
    logits = model(batch["input_ids"], batch["error_code_ids"])
    text = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    scores = model.network.diagnose(model.network(batch["input_ids"], batch["error_code_ids"]))
    diagnosis = functional.cross_entropy(scores.flatten(0, 1), batch["diagnosis_labels"].flatten())
    torch.testing.assert_close(model.training_step(batch), text + 0.3 * diagnosis, rtol=1e-12, atol=0)


@pytest.mark.parametrize("preset", ["gearhead-small", "gearhead-text"])
def test_a_gradient_reaches_every_parameter(build, batch, preset):
    model = build(preset)
    model.training_step(batch).backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []


def test_without_codes_and_questions_every_parameter_still_takes_part(build, batch):
    model = build()
    model.training_step({"input_ids": batch["input_ids"], "labels": batch["labels"]}).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_batch_with_nothing_to_score_has_loss_zero_not_nan(build, batch):
    ignored = {key: torch.full_like(value, -100) for key, value in batch.items() if key.endswith("labels")}
    assert build().training_step({**batch, **ignored}).item() == 0.0


def test_four_rows_are_learnt_by_heart(build, batch):
    model = build()
    four = _cut(batch, 0, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(60):
        loss = model.training_step(four)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_validation_counts_tokens_not_batches(build, batch, tmp_path):
    model = build()
    batches = [_cut(batch, 0, 1), _cut(batch, 1, 5)]
    metrics = _trainer(tmp_path).validate(model, _Data(batches), verbose=False)[0]
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["error_code_ids"])
        expected = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).item()

    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert 0 <= metrics["val/diagnosis_accuracy"] <= 1
    assert metrics["val/diagnosis_loss"] > 0


def test_a_second_validation_starts_from_zero(build, batch, tmp_path):
    model, trainer = build(), _trainer(tmp_path)
    first = trainer.validate(model, _Data([batch]), verbose=False)
    assert trainer.validate(model, _Data([batch]), verbose=False) == first


def test_training_logs_the_loss_and_moves_the_weights(build, batch, tmp_path):
    model, trainer = build(warmup_steps=1), _trainer(tmp_path, max_steps=3)
    before = model.network.token_embedding.weight.clone()
    trainer.fit(model, _Data([batch] * 3))

    assert trainer.callback_metrics["train/loss"] > 0
    assert not torch.equal(before, model.network.token_embedding.weight)


def test_biases_and_layer_norms_do_not_decay(build):
    model = build()
    groups = decay_groups(model.network.parameters(), weight_decay=0.01)
    decayed, plain = adamw(groups, hparams=model.hparams).param_groups
    names = {id(parameter): name for name, parameter in model.network.named_parameters()}

    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    assert all("bias" not in names[id(p)] and "ln_" not in names[id(p)] for p in decayed["params"])
    assert all("bias" in names[id(p)] or "ln_" in names[id(p)] for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_the_kernel_is_fused_where_torch_has_it_and_nothing_forbids_it():
    assert kernel_arguments("auto", device="cpu") == {"fused": True}
    assert kernel_arguments("auto", device="meta") == {}
    assert kernel_arguments("auto", device="cpu", precision="16-mixed") == {}
    assert kernel_arguments("foreach", device="cpu") == {"foreach": True}
    assert kernel_arguments("forloop", device="cpu") == {"foreach": False}


def test_a_fused_kernel_that_torch_lacks_is_refused():
    with pytest.raises(ValueError, match="no fused AdamW for meta"):
        kernel_arguments("fused", device="meta")
    assert kernel_arguments("fused", device="cpu") == {"fused": True}


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [("linear", [0.5, 1.0, 0.5, 0.0]), ("cosine", [0.5, 1.0, 0.5, 0.0]), ("constant", [0.5, 1, 1, 1])],
)
def test_the_rate_rises_through_the_warm_up_then_follows_its_schedule(schedule, factors):
    shares = [learning_rate_factor(step, warmup_steps=1, total_steps=5, schedule=schedule) for step in (0, 1, 3, 5)]
    assert shares == pytest.approx(factors)


def test_a_falling_schedule_needs_an_end(build, batch, tmp_path):
    with pytest.raises(ValueError, match="set max_steps or max_epochs, or schedule=constant"):
        _trainer(tmp_path, max_epochs=-1).fit(build(), _Data([batch]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "linaer"}, "did you mean linear"),
        ({"optimizer_kernel": "fuse"}, "did you mean fused"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"heads": 5}, "valid head counts: 1, 2, 4, 8, 16, 32"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(build, change, message):
    with pytest.raises(ValueError, match=message):
        build(**change)


def test_a_checkpoint_is_plain_data_and_restores_model_and_tokenizer(build, batch, tokenizer, tmp_path):
    model, trainer = build(), _trainer(tmp_path, max_steps=1)
    trainer.fit(model, _Data([batch], tokenizer))
    path = tmp_path / "m.ckpt"
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    again = GearHead.load_from_checkpoint(path, weights_only=True)

    assert again.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert again.config == model.config
    assert torch.equal(again.eval()(batch["input_ids"]), model.eval()(batch["input_ids"]))


def test_a_checkpoint_of_other_sizes_is_refused(build):
    checkpoint = {}
    build().on_save_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=r"layers 2 \(here 1\)"):
        build(layers=1).on_load_checkpoint(checkpoint)
    build(dropout=0.3).on_load_checkpoint(checkpoint)


def test_a_checkpoint_of_something_else_is_refused(build):
    with pytest.raises(ValueError, match="not one of GearHead"):
        build().on_load_checkpoint({"state_dict": {}})


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(build, tokenizer):
    with pytest.raises(ValueError, match="the tokenizer has 265 tokens, the model's vocabulary is 264"):
        build(vocabulary=264).attach_tokenizer(tokenizer)
    build(vocabulary=265).attach_tokenizer(tokenizer)


def test_another_tokenizer_than_the_checkpoints_is_refused(build, tokenizer):
    model, checkpoint = build(), {}
    model.attach_tokenizer(tokenizer)
    model.on_save_checkpoint(checkpoint)
    other = type(tokenizer).from_str(tokenizer.to_str())
    other.add_tokens(["engine"])
    resumed = build()
    resumed.attach_tokenizer(other)
    with pytest.raises(ValueError, match="another tokenizer"):
        resumed.on_load_checkpoint(checkpoint)


def test_a_tokenizer_with_other_special_ids_is_refused(build, tokenizer):
    text = tokenizer.to_str().replace('"<pad>"', '"<gap>"')
    with pytest.raises(ValueError, match="<pad> has id None"):
        build().attach_tokenizer(type(tokenizer).from_str(text))


def test_recompute_can_be_switched_from_outside(build):
    """A strategy that turns recomputation on must reach the blocks."""
    module = build()
    module.recompute = True

    assert module.network.recompute
    assert module.recompute


def test_gearhead_can_recompute_some_of_its_blocks():
    assert len(recompute_policies(GearHead(layers=3, width=32, heads=2, feed_forward=32, vocabulary=64))) == 7


def test_gearheads_loss_is_the_same_in_any_chunk():
    torch.manual_seed(0)
    module = GearHead(layers=1, width=32, heads=2, feed_forward=32, vocabulary=64, dropout=0.0)
    ids = torch.randint(9, 64, (2, 16))

    def outcome(rows):
        module.zero_grad()
        memory_option = LossChunk(module, rows)
        loss = module.training_step({"input_ids": ids, "labels": ids})
        loss.backward()
        memory_option.undo()
        return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(outcome(None), outcome(3), strict=True))
