"""Finetune under a Trainer: presets, checkpoints, resumes, refusals before the first step."""

import pytest
import torch

from lightning_unified.callbacks import RunCheckpoint
from lightning_unified.models.causal_lm.weights import build_language_model
from lightning_unified.models.finetune import Finetune
from lightning_unified.models.finetune.presets import PRESETS
from tests.support.finetune import TINY, build, chats, data, fit
from tests.support.lanes import first_cells

pytest.importorskip("transformers")
pytest.importorskip("peft")


def weights(module):
    return torch.cat([one.detach().flatten() for one in module.parameters()])


@first_cells(4, "name", PRESETS)
def test_a_preset_has_the_parameters_it_states(name):
    with torch.device("meta"):
        module = Finetune(preset=name, lora_rank=None)

    assert sum(one.numel() for one in module.parameters()) == PRESETS[name].parameters


def test_training_lowers_the_loss_on_answers(tmp_path):
    module = build(learning_rate=1e-2)
    first = fit(module, data(chats(tmp_path)), tmp_path, steps=1).callback_metrics["train/loss"]
    last = fit(module, data(chats(tmp_path)), tmp_path, steps=30).callback_metrics["train/loss"]

    assert last < 0.5 * first


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a model of the tiny architecture, as somebody's own weights."""
    torch.manual_seed(5)
    build_language_model(TINY).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@first_cells(1, "dora", [False, True])
def test_a_checkpoint_of_adapters_leaves_out_weights_that_were_read(tmp_path, folder, dora):
    settings = {"architecture": None, "pretrained": folder, "lora_rank": 2, "dora": dora, "learning_rate": 0.1}
    module = build(**settings)
    fit(module, data(chats(tmp_path)), tmp_path, RunCheckpoint(tmp_path, every_n_steps=2, monitor=None), steps=2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    again = build(**settings)
    again.on_load_checkpoint(saved)
    again.load_state_dict(saved["state_dict"])

    written = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(".lora_" in name for name in written)
    assert torch.equal(weights(again), weights(module))
    assert again.chat == module.chat
    with pytest.raises(ValueError, match="holds adapters only"):
        build(lora_rank=2).on_load_checkpoint(torch.load(tmp_path / "last.ckpt", weights_only=True))


@first_cells(1, "packing", [False, True])
def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path, packing):
    rows = {"packing": packing, "batch_size": 2}
    whole, again = build(), build(seed=1)
    keeps = RunCheckpoint(tmp_path / "a", every_n_steps=2, keep=9, monitor=None)
    fit(whole, data(chats(tmp_path), **rows), tmp_path, keeps, steps=4)
    place = tmp_path / "a" / "step_000002.ckpt"
    fit(
        again,
        data(chats(tmp_path), **rows),
        tmp_path,
        RunCheckpoint(tmp_path / "b", monitor=None),
        steps=4,
        resume=place,
    )

    assert torch.equal(weights(again), weights(whole))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"preset": "smollm"}, "preset='smollm' is not offered; did you mean smollm2_"),
        ({"dora": True}, "dora=true needs adapters"),
        ({"lora_rank": 2, "lora_targets": ["query"]}, r"lora_targets=\['query'\]"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"schedule": "step"}, "schedule='step'"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(ValueError, match=message):
        build(**setting)


def test_data_that_do_not_fit_the_model_are_refused(tmp_path):
    for change, message in [({"sequence_length": 512}, "256 positions"), ({"vocab_size": 700}, "vocabulary is 320")]:
        with pytest.raises(ValueError, match=message):
            fit(build(), data(None, **change, too_long="drop"), tmp_path)


def test_another_tokenizer_than_that_of_the_training_is_refused(tmp_path):
    module = build()
    fit(module, data(chats(tmp_path)), tmp_path)
    with pytest.raises(ValueError, match="another tokenizer or chat template"):
        fit(module, data(chats(tmp_path), vocab_size=300), tmp_path)
