"""From a checkpoint file to fewer tokens and a record, in Python and on the command line.

An untrained policy is refused.
"""

import json
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_unified.models.compressor import __main__ as commands
from lightning_unified.models.compressor import compress, sizes
from lightning_unified.models.compressor.evaluation.callback import EvaluateCompression
from lightning_unified.models.compressor.inference import checkpoint as checkpoints
from lightning_unified.models.compressor.module import Compressor
from tests.support.lanes import first_cells

TEXT = "The pump leaks at the shaft seal, because the seal has run dry. Renew the seal and prime the pump."
TEXTS = [f"{TEXT} Report {number}: pump {number * 7} was primed and tested again." for number in range(6)]


class _Data(LightningDataModule):
    """The same few rows again and again; describes itself as text data does."""

    def __init__(self, tokenizer):
        super().__init__()
        self.hparams.update({"source": "builtin", "path": None, "val_fraction": 0.3, "seed": 0, "max_groups": None})
        self.tokenizer, self.text_length = tokenizer, 24
        rows = torch.tensor([tokenizer.encode(text).ids[:24] for text in TEXTS])
        self.batches = [{"input_ids": rows, "mask": torch.ones_like(rows, dtype=torch.bool)}] * 3

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    def val_dataloader(self):
        return DataLoader(self.batches[:1], batch_size=None)


def _trainer(folder, *callbacks, **arguments):
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks), **arguments,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer):
    """Return the checkpoints of before and after three steps, and the callback's folder."""
    folder = tmp_path_factory.mktemp("compressor")
    watch = EvaluateCompression(
        texts=TEXTS[3:],
        corpus=TEXTS[:3],
        keeps=(0.5,),
        length=24,
        continuation=6,
        resamples=50,
        directory=folder / "watch",
    )
    module = Compressor(preset="compressor-tiny", warmup_steps=1)
    trainer = _trainer(folder, watch, max_steps=3, max_epochs=1)
    trainer.fit(module, _Data(tokenizer))
    trainer.save_checkpoint(folder / "after.ckpt")
    saved = torch.load(folder / "after.ckpt", weights_only=True)
    torch.save({**saved, "global_step": 0}, folder / "before.ckpt")
    return folder, trainer


@pytest.fixture(scope="module")
def checkpoint(trained):
    return trained[0] / "after.ckpt"


@pytest.fixture(scope="module")
def module(checkpoint):
    return checkpoints.load(checkpoint, device="cpu")


@first_cells(1, "keep", [0.1, 0.5, 0.77, 1.0])
def test_exactly_the_share_asked_for_is_kept_also_of_a_text_of_several_windows(module, keep):
    text = TEXT * 3  # 13 windows of up to 24 tokens

    found = compress(text, keep=keep, module=module)

    assert len(found.ids) == round(keep * len(text))
    assert found.kept == sorted(set(found.kept))
    assert found.ids == [found.original_ids[place] for place in found.kept]
    assert found.text == "".join(text[place] for place in found.kept)


def test_no_window_is_longer_than_the_texts_of_the_training(module, monkeypatch):
    lengths = []
    scores = module.keep_logits
    monkeypatch.setattr(module, "keep_logits", lambda ids, mask: lengths.append(ids.shape[1]) or scores(ids, mask))

    compress(TEXT, module=module)

    assert module.config.policy.positions == 32
    assert max(lengths) <= 24


def test_the_tokens_of_highest_score_are_kept(module):
    ids = torch.tensor([module.tokenizer.encode(TEXT)[:24]])
    with torch.no_grad():
        scores = module.keep_logits(ids, torch.ones_like(ids, dtype=torch.bool))[0]

    found = compress(TEXT[:24], keep=0.25, module=module)

    assert found.kept == sorted(scores.topk(6).indices.tolist())


def test_an_untrained_module_is_refused(tokenizer):
    fresh = Compressor(preset="compressor-tiny")
    fresh.attach_tokenizer(tokenizer)

    with pytest.raises(RuntimeError, match="has not been trained"):
        compress(TEXT, module=fresh)


def test_a_checkpoint_of_before_training_is_refused(trained):
    with pytest.raises(RuntimeError, match="saved before the first step"):
        compress(TEXT, checkpoint=trained[0] / "before.ckpt")


def test_a_checkpoint_keeps_its_sizes_when_the_preset_of_its_name_has_others(checkpoint, module, tmp_path, monkeypatch):
    config = sizes.PRESETS["compressor-tiny"]
    bigger = replace(config, reader=replace(config.reader, layers=3, feed_forward=32))
    monkeypatch.setitem(sizes.PRESETS, "compressor-tiny", bigger)

    assert checkpoints.load(checkpoint, device="cpu").config == module.config != bigger


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    torch.save({"state_dict": {}, "hyper_parameters": {}, "gearhead": {}, "global_step": 5}, tmp_path / "other.ckpt")

    with pytest.raises(RuntimeError, match="not a checkpoint of a compressor"):
        checkpoints.load(tmp_path / "other.ckpt")


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "damaged.ckpt").write_bytes(b"no checkpoint at all")

    with pytest.raises(RuntimeError, match="cannot be read as a checkpoint"):
        checkpoints.load(tmp_path / "damaged.ckpt")


def test_no_checkpoint_and_no_module_is_refused():
    with pytest.raises(ValueError, match="give either module="):
        compress(TEXT)


def test_an_empty_text_is_refused(module):
    with pytest.raises(ValueError, match="the text is empty"):
        compress("", module=module)


def test_the_callback_leaves_a_record_a_plot_and_figures(trained):
    folder, trainer = trained
    (record,) = (folder / "watch").glob("*.json")

    found = json.loads(record.read_text())

    assert found["global_step"] == 3
    assert {row["keep"] for row in found["rows"]} == {0.5}
    assert record.with_suffix(".png").exists()
    lost = {row["method"]: row["dropped_cross_entropy"]["mean"] for row in found["rows"]}
    policy, figures = lost.pop("policy"), trainer.callback_metrics
    assert figures["val/dropped_cross_entropy@0.5"].item() == pytest.approx(policy)
    assert figures["val/margin@0.5"].item() == pytest.approx(min(lost.values()) - policy, abs=1e-5)
    assert figures["val/continuation_perplexity@0.5"].item() > 1


def test_the_callback_waits_for_its_epoch(tmp_path, tokenizer):
    watch = EvaluateCompression(every_n_epochs=2, texts=TEXTS, corpus=TEXTS, directory=str(tmp_path / "watch"))

    trainer = _trainer(tmp_path, watch, max_epochs=1, max_steps=3)
    trainer.fit(Compressor(preset="compressor-tiny", warmup_steps=1), _Data(tokenizer))

    assert "val/loss" in trainer.callback_metrics  # the first epoch has been validated
    assert not (tmp_path / "watch").exists()


def test_the_callback_refuses_before_the_first_step_what_it_cannot_evaluate(tmp_path, tokenizer):
    undescribed = _Data(tokenizer)
    undescribed.hparams.clear()
    for module, message in (
        (BoringModel(), "this is BoringModel"),
        (Compressor(preset="compressor-tiny"), "seed missing"),
    ):
        with pytest.raises(ValueError, match=message):
            _trainer(tmp_path, EvaluateCompression(), max_steps=1).fit(module, undescribed)


def test_a_file_is_compressed_on_the_command_line(checkpoint, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    page = tmp_path / "text.html"
    asked = ["compress", "--checkpoint", str(checkpoint), "--keep", "0.5", str(tmp_path / "text.txt")]

    assert commands.main([*asked, "--device", "cpu", "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)

    assert len(found["kept"]) == len(found["ids"]) == round(0.5 * len(TEXT))
    assert "<mark>" in page.read_text()


def test_standard_input_is_compressed_to_standard_output(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.read", lambda: TEXT, raising=False)

    assert commands.main(["compress", "--checkpoint", str(checkpoint), "--device", "cpu"]) == 0

    assert len(capsys.readouterr().out) == round(0.5 * len(TEXT)) + 1


def test_the_whole_text_is_shown_with_brackets_where_there_are_no_colours(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.read", lambda: TEXT, raising=False)

    assert commands.main(["compress", "--checkpoint", str(checkpoint), "--device", "cpu", "--show"]) == 0

    shown = capsys.readouterr().out
    assert shown.replace("[-", "").replace("-]", "") == f"{TEXT}\n"
    assert "[-" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--checkpoint", "nowhere.ckpt"], 2, "there is no checkpoint nowhere.ckpt"),
        (["--checkpoint", "{before}"], 1, "saved before the first step"),
        (["--checkpoint", "{after}", "--keep", "1.5"], 2, "not a share of the tokens"),
        (["--checkpoint", "{after}", "nowhere.txt"], 2, "there is no file nowhere.txt"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(trained, monkeypatch, capsys, arguments, code, message):
    monkeypatch.setattr("sys.stdin.read", lambda: TEXT, raising=False)
    folder = trained[0]
    asked = [part.format(before=folder / "before.ckpt", after=folder / "after.ckpt") for part in arguments]

    assert commands.main(["compress", "--device", "cpu", *asked]) == code
    said = capsys.readouterr()

    assert message in said.err
    assert said.out == ""


def test_an_evaluation_on_the_command_line_leaves_record_and_plot(checkpoint, tmp_path, capsys):
    asked = ["evaluate", "--checkpoint", str(checkpoint), "--device", "cpu", "--documents", "3", "--no-rouge"]

    assert commands.main([*asked, "--keep", "0.5", "--per-document", "1", "--output", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())

    assert record["data"]["source"] == "builtin"
    assert {row["method"] for row in record["rows"]} >= {"policy", "random", "frequency"}
    assert (tmp_path / "out" / "evaluation.png").exists()
    assert "frequency" in capsys.readouterr().out
