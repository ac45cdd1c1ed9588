"""The classifier under a Trainer: split and trimmed exactly.

It learns, resumes and calibrates; its errors name what does not fit.
"""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.models.classifier import TextClassifier
from lightning_unified.models.classifier.evaluation.temperature import fit_temperature
from lightning_unified.models.classifier.network.trimming import trimmed, with_row_lengths
from lightning_unified.models.classifier.training.objective import class_weights
from lightning_unified.models.training import decay_groups
from tests.support.lanes import slow


def _weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "weights", [slow("none"), "balanced", slow([0.5, 2.0, 3.0])], ids=["none", "balanced", "listed"]
)
def test_training_in_trimmed_micro_batches_is_training_whole(build, data, fit, weights):
    runs = []
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=2, predict=False)):
        model = build(class_weights=weights, label_smoothing=0.1).double()
        trainer = fit(model, data, strategy=strategy, precision="64-true")
        runs.append((_weights(model), float(trainer.callback_metrics["train/loss"])))
    (whole, loss), (parts, parts_loss) = runs

    assert (parts - whole).norm() <= 1e-12 * whole.norm()
    assert parts_loss == pytest.approx(loss, rel=1e-6)


def test_the_loss_is_torchs_weighted_mean_over_the_whole_batch(build, batches):
    model = build(labels=3, class_weights=[1.0, 2.0, 5.0], label_smoothing=0.2).eval()
    batch = batches[1]
    own = model.training_step(batch)
    torchs = functional.cross_entropy(
        model(batch["input_ids"], batch["attention_mask"]), batch["labels"],
        weight=torch.tensor([1.0, 2.0, 5.0]), label_smoothing=0.2,
    )  # fmt: skip

    torch.testing.assert_close(own, torchs)


def test_a_row_without_a_label_counts_nowhere(build, batches):
    model = build(labels=3, class_weights=[1.0, 2.0, 5.0]).double().eval()
    batch = batches[1]
    wider = {name: torch.cat([values, values[:2]]) for name, values in batch.items()}
    wider["labels"][-2:] = -100
    model._outputs.update(model.batch_logits(wider), wider["labels"])

    torch.testing.assert_close(model.training_step(wider), model.training_step(batch), rtol=1e-12, atol=0)
    assert torch.equal(model._outputs.compute()[1], batch["labels"])


@pytest.mark.parametrize("lengths", [(4, 8, 12), (2, 3, 4, 5, 6)])
def test_a_micro_batch_of_short_rows_loses_padding_and_no_prediction_changes(build, batches, lengths):
    model = build(labels=3).double().eval()
    model.identity.lengths = lengths
    wide = {name: functional.pad(batches[0][name], (0, 12)) for name in ("input_ids", "attention_mask")}
    batch = with_row_lengths({**wide, "labels": batches[0]["labels"]})
    part = {name: values[:3] for name, values in batch.items()}

    assert trimmed(batch, lengths=lengths)["input_ids"].shape[1] == min(fixed for fixed in lengths if fixed >= 5)
    assert trimmed(part, lengths=lengths)["input_ids"].shape[1] == 4
    for given in (batch, part):
        plain = model(given["input_ids"], given["attention_mask"])
        torch.testing.assert_close(model.batch_logits(given), plain, rtol=0, atol=1e-12)


def test_pads_before_the_tokens_are_never_cut_off(batches):
    left = {name: functional.pad(batches[0][name].flip(1), (4, 0)) for name in ("input_ids", "attention_mask")}

    assert trimmed(with_row_lengths(left), lengths=(4, 8))["input_ids"].shape[1] == 12


def test_it_learns_a_few_texts_by_heart_and_reports_it(build, data, fit):
    model = build()
    trainer = fit(model, data, max_steps=40, limit_val_batches=1.0, check_val_every_n_epoch=10)

    assert trainer.callback_metrics["val/accuracy"] == 1.0
    assert model.report.confusion == [[8, 0, 0], [0, 8, 0], [0, 0, 8]]
    assert model.report.label_names == ["apples", "bears", "clouds"]


def test_what_it_says_depends_on_the_text(build, batches):
    model = build(labels=3).eval()
    logits = model(batches[0]["input_ids"], batches[0]["attention_mask"])

    assert (logits - logits[:1]).abs().amax(1)[1:].min() > 1e-4


def test_a_resumed_run_has_the_weights_of_one_that_was_not_stopped(build, data, fit, tmp_path):
    data.batches = data.batches[:1] * 4  # this loader knows no place within an epoch
    fit(straight := build(), data, max_steps=4)
    fit(build(), data, max_steps=2).save_checkpoint(tmp_path / "two.ckpt")
    fit(second := build(), data, max_steps=4, ckpt_path=tmp_path / "two.ckpt")

    assert torch.equal(_weights(second), _weights(straight))


def test_matrices_decay_and_vectors_do_not(build):
    model = build()
    decayed, plain = decay_groups(model.network.parameters(), weight_decay=0.3)
    names = {id(parameter): name for name, parameter in model.network.named_parameters()}

    assert decayed["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0.0
    assert all("LayerNorm" not in names[id(p)] and not names[id(p)].endswith("bias") for p in decayed["params"])
    assert {names[id(p)].rpartition(".")[2] for p in plain["params"]} == {"bias", "weight"}  # the norms' weights
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_only_adapters_and_head_train_and_the_first_step_starts_at_the_encoder(build, data, batches, fit):
    pytest.importorskip("peft")
    plain, adapted = build(labels=3).eval(), build(labels=3, lora_rank=2, class_weights="balanced").eval()
    torch.testing.assert_close(adapted.batch_logits(batches[0]), plain.batch_logits(batches[0]))
    before = {name: parameter.detach().clone() for name, parameter in adapted.named_parameters()}
    fit(adapted, data)
    moved = {name for name, parameter in adapted.named_parameters() if not torch.equal(parameter, before[name])}

    assert moved
    assert all("lora_" in name or "classifier" in name for name in moved)
    assert any("lora_B" in name for name in moved)
    assert any("classifier" in name for name in moved)


def test_a_name_that_no_layer_has_is_refused_with_those_there_are(build):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"lora_targets=\['q_proj'\].*dense, key, query, value"):
        build(lora_rank=2, lora_targets=["q_proj"])


def test_blocks_recompute_with_the_same_gradients(build, batches):
    model = build(labels=3)
    plain = _gradient(model, model.training_step(batches[2]))
    model.recompute = True
    again = _gradient(model, model.training_step(batches[2]))

    assert torch.equal(again, plain)
    assert len(model.recompute_blocks()) == 2


def test_the_temperature_that_made_overconfident_logits_is_found():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)

    assert fit_temperature(logits * 2.5, labels) == pytest.approx(2.5, rel=0.08)
    assert fit_temperature(logits, logits.argmax(1)) == pytest.approx(0.05)  # nothing is wrong: the least there is


def test_the_checkpoint_holds_the_temperature_and_predictions_are_divided_by_it(build, data, fit, tmp_path):
    model = build()
    trainer = fit(model, data, limit_val_batches=1.0)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = TextClassifier.load_from_checkpoint(tmp_path / "one.ckpt", map_location="cpu").eval()
    batch = data.batches[0]

    assert float(again.temperature) == float(model.temperature) != 1.0
    assert again.label_names == data.label_names
    wanted = (model.eval()(batch["input_ids"], batch["attention_mask"]) / model.temperature).softmax(1)
    torch.testing.assert_close(again.predict_step(batch), wanted)


def test_balanced_weights_make_all_classes_weigh_the_same_in_sum():
    weights = class_weights("balanced", labels=3, counts=[10, 20, 70])

    torch.testing.assert_close(weights * torch.tensor([10.0, 20.0, 70.0]), torch.full((3,), 100 / 3))
    with pytest.raises(ValueError, match="class 1 has no training row"):
        class_weights("balanced", labels=2, counts=[3, 0])


class _Bare(LightningDataModule):
    def __init__(self, batches, **known):
        super().__init__()
        self.batches = batches
        vars(self).update(known)

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)


@pytest.mark.parametrize(
    ("changes", "known", "message"),
    [
        ({"labels": 2}, {"label_names": ["x", "y", "z"]}, r"model\.labels=2, and the data has 3: x, y, z"),
        ({}, {"text_length": 600}, r"up to 600 tokens, and the encoder has positions for 512"),
        ({"class_weights": "balanced"}, {"label_names": ["x", "y"]}, r"does not say \(class_counts\)"),
        ({"class_weights": [1.0, 2.0]}, {"label_names": ["x", "y", "z"]}, r"give 3 weights, one a label"),
        ({"schedule": "linear"}, {}, r"need to know the last step; set max_steps"),
    ],
)
def test_data_that_does_not_fit_is_refused(build, batches, fit, changes, known, message):
    with pytest.raises(ValueError, match=message):
        fit(build(**changes), _Bare(batches, **known), max_steps=-1, max_epochs=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "classifier-minilmm"}, r"did you mean classifier-minilm\?"),
        ({"class_weights": "balance"}, r"did you mean balanced\?"),
        ({"label_smoothing": 1.0}, r"label_smoothing=1\.0 is not a share"),
        ({"labels": 1}, r"labels=1; give 2 or more"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0 must be above 0"),
    ],
)
def test_an_argument_out_of_range_is_refused(build, changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)
