"""Data of a run: the line about it, the test set at the end, data that do not fit the model."""

import json

import pytest

from lightning_unified.cli.run.data_fit import lacking
from tests.support.lanes import first_cells

CLASSIFIER = ("model=classifier-tiny", "callbacks=classifier", "memory=debug", "hardware=cpu")
OFTEN = ("trainer.enable_progress_bar=false", "run_dir=run")


@pytest.mark.slow
def test_a_run_says_what_it_read_and_tests_the_best_weights_at_its_end(command, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "own.csv").write_text(
        "kind;message\n"
        + "".join(
            f"{kind};{kind * 2} text number {place} {place * 3}\n" for place in range(20) for kind in ("good", "bad")
        )
        + "good; \n"
    )
    own = (
        "data=classifier-tiny",
        "data.source=files",
        "data.path=own.csv",
        "data.text_column=message",
        "data.label_column=kind",
    )
    done = command(*CLASSIFIER, *OFTEN, *own, "trainer.max_steps=-1", "trainer.max_epochs=1")
    summary = json.loads((tmp_path / "run/summary.json").read_text())

    assert done.code == 0
    assert (
        "data 41 rows read, left out 1 blank; 28 to train, 4 to validate, 8 to test; 2 classes: bad 14, good 14"
        in done.out
    )
    assert f"macro-F1 {summary['validation']['macro_f1']:.4f}" in done.out
    assert f"test        loss {summary['test']['loss']:.4f}" in done.out
    assert json.loads((tmp_path / "run/plots/test.json").read_text())["rows"] == 8


@pytest.mark.slow
def test_after_a_test_the_files_still_say_how_the_training_ran(command, tmp_path):
    pytest.importorskip("transformers")
    assert command(*CLASSIFIER, *OFTEN, "trainer.max_steps=2", "memory.micro_batch_size=2").code == 0
    summary, plan = (json.loads((tmp_path / f"run/{name}.json").read_text()) for name in ("summary", "plan"))

    assert summary["test"] is not None
    assert (summary["effective_batch_size"], summary["micro_batch_size"], plan["micro_batch_size"]) == (4, 2, 2)
    assert plan["reasons"]["prediction"] != "no batch has run yet"


@first_cells(2, ("arguments", "message"),
    [
        (("model=gearhead-small", "data=classifier-tiny"), "data=classifier-tiny makes batches of input_ids (B, T), attention_mask (B, T), labels (B), and model=gearhead-small reads input_ids (B, T), labels (B, T). Leave out data="),
        (("model=compressor-small", "data=builtin"), "model=compressor-small reads input_ids (B, T), mask (B, T)"),
        (("model=wordle-tiny", "data=classifier-tiny"), "model.inner_iterations takes the value of data.inner_iterations, which data=classifier-tiny does not have"),
        (("model.learning_rate=nan",), "model.learning_rate=nan: it must be a finite number"),
        (("model.betas=[0.9,inf]",), "model.betas.1=inf: it must be a finite number"),
        (("trainer.gradient_clip_val=nan",), "trainer.gradient_clip_val=nan: it is a norm, 0"),
    ],
)  # fmt: skip
def test_data_of_another_model_and_numbers_that_are_none_are_refused_by_name(command, tmp_path, arguments, message):
    done = command("hardware=cpu", "memory=debug", "trainer.max_steps=1", *OFTEN, *arguments)

    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert not (tmp_path / "run/checkpoints").exists()


def test_an_entry_that_the_first_batch_lacks_is_named_and_other_keys_are_not_ours():
    choices = {"model": "mine", "data": "theirs"}
    named = lacking(KeyError("mask"), ("input_ids", "labels"), choices)

    assert str(named).startswith(
        "the step of model=mine reads 'mask', and the batches of data=theirs have input_ids, labels."
    )
    assert lacking(KeyError("labels"), ("input_ids", "labels"), choices) is None
    assert lacking(KeyError(3), ("input_ids",), choices) is None
    assert lacking(KeyError("mask"), (), choices) is None
