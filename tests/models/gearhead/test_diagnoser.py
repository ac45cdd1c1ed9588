"""From a checkpoint file to a diagnosis, in Python and on the command line."""

import json
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lightning_unified.data.documents import record as layout
from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.gearhead.__main__ import main
from lightning_unified.models.gearhead.diagnoser import Diagnoser
from lightning_unified.models.gearhead.module import GearHead
from tests.support.lanes import first_cells
from tests.support.programs import run_program

GREEDY = Sampling(max_new_tokens=60, temperature=0)
RECORD = layout.Record(
    equipment="pump", symptom="leak", error_codes=("P0087",), probable_cause="seal", solution="renew seal"
)


class _Data(LightningDataModule):
    def __init__(self, batch, tokenizer):
        super().__init__()
        self.batch, self.tokenizer = batch, tokenizer

    def train_dataloader(self):
        return DataLoader([self.batch] * 120, batch_size=None)


def _save(path, *, tokenizer, preset="gearhead-small", text=None, steps=120):
    text = text or layout.render(RECORD)
    encoded = tokenizer.encode(text)
    ids = torch.tensor([encoded.ids])
    asked = torch.full_like(ids, -100)
    if layout.question_offset(text) is not None:
        asked[0, encoded.ids.index(tokenizer.token_to_id("<error>"))] = 3
    torch.manual_seed(0)
    model = GearHead(
        preset=preset, vocabulary=300, positions=160, width=32, layers=2, heads=4, feed_forward=64,
        dropout=0.0, learning_rate=1e-2, warmup_steps=5, diagnosis_weight=1.0,
    )  # fmt: skip
    trainer = Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=path.parent,
    )  # fmt: skip
    trainer.fit(model, _Data({"input_ids": ids, "labels": ids, "diagnosis_labels": asked}, tokenizer))
    trainer.save_checkpoint(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    """A model that has learnt one record by heart."""
    path = tmp_path_factory.mktemp("gearhead") / "model.ckpt"
    _save(path, tokenizer=tokenizer)
    return path


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory, tokenizer):
    """A text model that has learnt one sentence by heart."""
    path = tmp_path_factory.mktemp("text") / "model.ckpt"
    _save(path, tokenizer=tokenizer, preset="gearhead-text", text="<s>the valve is closed before the pump starts</s>")
    return path


def _command(*arguments, given=""):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("LIGHTNING_UNIFIED_DEBUG", None)
    return run_program("lightning_unified.models.gearhead", "infer", *arguments, given=given, environment=environment)


def test_a_diagnosis_repeats_what_was_learnt(checkpoint):
    result = Diagnoser.from_checkpoint(checkpoint, device="cpu").diagnose("pump", "leak", ["P0087"], sampling=GREEDY)

    assert result.pop("subsystem_probability") > 0.9
    assert result == {
        "equipment": "pump",
        "symptom": "leak",
        "error_codes": ["P0087"],
        "probable_cause": "seal",
        "solution": "renew seal",
        "full_response": "seal\n<solution> renew seal",
        "subsystem": "powertrain P_3: ignition, misfire and engine speed",
    }


def test_a_batch_gives_what_its_records_give_one_by_one(checkpoint):
    diagnoser = Diagnoser.from_checkpoint(checkpoint, device="cpu")
    records = [
        {"equipment": "pump", "symptom": "leak"},
        {"equipment": "a long name", "symptom": "x", "error_codes": ["E1234"]},
    ]
    together = diagnoser.batch_diagnose(records, sampling=GREEDY)
    alone = [
        diagnoser.diagnose(r["equipment"], r["symptom"], r.get("error_codes", []), sampling=GREEDY) for r in records
    ]
    assert together == alone


def test_the_probability_does_not_depend_on_the_codes(checkpoint):
    diagnoser = Diagnoser.from_checkpoint(checkpoint, device="cpu")
    results = [diagnoser.diagnose("pump", "leak", given, sampling=GREEDY) for given in ([], ["P0087"], ["U0100"])]
    assert len({result["subsystem_probability"] for result in results}) == 1


def test_a_text_model_continues_text_and_refuses_records(text_checkpoint):
    diagnoser = Diagnoser.from_checkpoint(text_checkpoint, device="cpu")
    answers = diagnoser.generate(["the valve", "<s>the valve", ""], sampling=GREEDY)
    assert answers == [" is closed before the pump starts"] * 2 + ["the valve is closed before the pump starts"]
    with pytest.raises(ValueError, match="trained on plain text"):
        diagnoser.diagnose("pump", "leak")


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path, checkpoint):
    saved = torch.load(checkpoint, weights_only=True)
    saved["gearhead"]["tokenizer"] = None
    torch.save(saved, tmp_path / "bare.ckpt")
    with pytest.raises(RuntimeError, match="holds no tokenizer"):
        Diagnoser.from_checkpoint(tmp_path / "bare.ckpt")


def test_a_checkpoint_whose_weights_were_altered_is_refused(tmp_path, checkpoint):
    saved = torch.load(checkpoint, weights_only=True)
    del saved["state_dict"]["network.ln_final.weight"]
    torch.save(saved, tmp_path / "altered.ckpt")
    with pytest.raises(RuntimeError, match="do not belong together"):
        Diagnoser.from_checkpoint(tmp_path / "altered.ckpt")


def test_the_command_prints_a_report_and_writes_json(checkpoint, tmp_path):
    out = tmp_path / "out.json"
    done = _command(
        "--checkpoint", checkpoint, "--equipment", "pump", "--symptom", "leak", "--error-codes", "P0087", "SPN 157",
        "--temperature", "0", "--output", out,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    for line in (
        "DIAGNOSTIC REPORT",
        "Equipment:            pump",
        "Error codes:          P0087, SPN 157",
        "Predicted subsystem:",
    ):
        assert line in done.stdout
    assert json.loads(out.read_text())["error_codes"] == ["P0087", "SPN 157"]


def test_the_command_reads_a_corrupt_checkpoint_without_a_traceback(tmp_path):
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(bytes(range(256)) * 4)
    done = _command("--checkpoint", broken, "--equipment", "pump", "--symptom", "leak")

    assert done.returncode == 1
    assert "cannot be read as a checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 12


def _main(*arguments):
    return main(["infer", "--temperature", "0", "--device", "cpu", *map(str, arguments)])


def test_a_batch_file_gives_a_list(checkpoint, tmp_path, capsys):
    questions, out = tmp_path / "in.json", tmp_path / "out.json"
    questions.write_text(
        json.dumps([{"equipment": "pump", "symptom": "leak"}, {"equipment": "crane", "symptom": "noise"}])
    )

    assert _main("--checkpoint", checkpoint, "--batch-file", questions, "--output", out) == 0
    assert [answer["equipment"] for answer in json.loads(out.read_text())] == ["pump", "crane"]
    assert capsys.readouterr().out.count("DIAGNOSTIC REPORT") == 2


def test_a_prompt_is_continued(text_checkpoint, capsys):
    assert _main("--checkpoint", text_checkpoint, "--prompt", "the valve", "--max-new-tokens", 3) == 0
    assert capsys.readouterr().out == "the valve is\n"


@pytest.mark.parametrize("leave", ["quit", "EXIT"])
def test_without_a_question_it_asks_until_told_to_leave(checkpoint, capsys, monkeypatch, leave):
    answers = iter(["", "pump", "leak", "P0087, SPN 157", "pump", "leak", "", leave])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))

    assert _main("--checkpoint", checkpoint) == 0
    out = capsys.readouterr().out
    assert out.count("DIAGNOSTIC REPORT") == 2
    assert "P0087, SPN 157" in out
    assert "Error codes:          none" in out


def test_the_end_of_input_leaves_the_loop(checkpoint, monkeypatch):
    def end(_):
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert _main("--checkpoint", checkpoint) == 0


@first_cells(
    8,
    ("arguments", "code", "message"),
    [
        (["--checkpoint", "nowhere.ckpt"], 2, "there is no checkpoint nowhere.ckpt"),
        (["--checkpoint", "GOOD", "--batch-file", "nowhere.json"], 2, "there is no batch file nowhere.json"),
        (["--checkpoint", "GOOD", "--batch-file", "wrong.json"], 2, "wrong.json is not JSON"),
        (["--checkpoint", "GOOD", "--batch-file", "object.json"], 2, "must hold a JSON list"),
        (["--checkpoint", "GOOD", "--batch-file", "incomplete.json"], 2, "symptom missing"),
        (["--checkpoint", "GOOD", "--equipment", "pump"], 2, "--equipment and --symptom belong together"),
        (["--checkpoint", "GOOD", "--error-codes", "P0087"], 2, "--error-codes needs"),
        (["--checkpoint", "GOOD", "--prompt", "x", "--batch-file", "y"], 2, "ask one thing at a time"),
        (["--checkpoint", "GOOD", "--prompt", "x", "--top-p", "3"], 2, "top_p=3.0"),
        (["--checkpoint", "GOOD", "--equipment", "x" * 200, "--symptom", "y"], 2, "with 160 positions at most 159"),
        (["--checkpoint", "empty.ckpt"], 1, "cannot be read as a checkpoint"),
        (["--checkpoint", "other.ckpt"], 1, "is not a checkpoint of GearHead"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(checkpoint, tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_UNIFIED_DEBUG", raising=False)
    Path("wrong.json").write_text("{")
    Path("object.json").write_text("{}")
    Path("incomplete.json").write_text('[{"equipment": "pump"}]')
    Path("empty.ckpt").touch()
    torch.save({"state_dict": {}}, "other.ckpt")

    assert _main(*(checkpoint if argument == "GOOD" else argument for argument in arguments)) == code
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("LIGHTNING_UNIFIED_DEBUG", "1")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        _main("--checkpoint", "nowhere.ckpt")
