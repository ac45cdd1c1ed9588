"""A trained classifier in use: predictions, export, explanations, clear errors.

An export is a folder and a program.
"""

import csv
import io
import json
import re

import pytest
import torch

from lightning_unified.models.classifier import classify, export
from lightning_unified.models.classifier.__main__ import main
from lightning_unified.models.classifier.explanation.explain import explain
from lightning_unified.models.classifier.explanation.render import page, segments, terminal
from lightning_unified.models.classifier.inference.checkpoint import load
from tests.support.lanes import first_cells


@pytest.fixture(scope="session")
def model(trained):
    return load(trained, device="cpu")


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory):
    """Return a folder that `export` wrote."""
    return export(model, tmp_path_factory.mktemp("exported")).folder


def test_predictions_are_the_models_own_whatever_texts_are_together(model, tokenizer, texts):
    given = [text for text, _ in texts]
    found = classify(given, module=model, batch_size=5)
    for text, one in zip(given, found, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        wanted = (model(ids) / model.temperature).softmax(1)[0]
        own = torch.tensor([one.probabilities[name] for name in model.label_names])
        torch.testing.assert_close(own, wanted.detach(), rtol=0, atol=1e-6)
        assert one.label == model.label_names[int(wanted.argmax())]
    assert [one.label for one in found] == [model.label_names[label] for _, label in texts]


def test_a_text_that_is_too_long_is_said_to_be_cut_off(model):
    short, long = classify(["a1 a2", " ".join(["a1"] * 40)], module=model)

    assert (short.tokens, short.cut_off) == (4, False)
    assert (long.tokens, long.cut_off) == (12, True)


def test_a_special_tokens_name_in_a_text_is_just_characters(model):
    ids = model.identity.encoder.encode(["a1 [SEP] a2"], max_length=12)[0].ids

    assert ids.count(3) == 1


def test_the_command_prints_records_and_tables_of_files_and_standard_input(
    trained, texts, tmp_path, capsys, monkeypatch
):
    table = tmp_path / "texts.csv"
    table.write_text("id,text\n1,a1 a2 a3\n2,b1 b2\n")
    (tmp_path / "one.txt").write_text("c1 c2\nc3 c4")
    monkeypatch.setattr("sys.stdin", io.StringIO("a5 a4\n\nb5 b3 b2\n"))

    assert main(["predict", "--checkpoint", str(trained), "--json", str(table), str(tmp_path / "one.txt"), "-"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["label"] for record in records] == ["apples", "bears", "clouds", "apples", "bears"]
    assert records[-1]["source"] == "-:3"
    assert sum(records[0]["probabilities"].values()) == pytest.approx(1)
    assert main(["predict", "--checkpoint", str(trained), "--csv", "--lines", str(tmp_path / "one.txt")]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["label"] for row in rows] == ["clouds", "clouds"]
    assert list(rows[0]) == ["source", "label", "apples", "bears", "clouds"]


def test_transformers_reads_the_exported_folder_and_says_the_same(model, folder, texts):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    again, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    given = [text for text, _ in texts[:5]]
    batch = tokenizer(given, padding=True, truncation=True, return_tensors="pt")
    facts = json.loads((folder / "classifier.json").read_text())
    with torch.no_grad():
        found = (again.eval()(**batch).logits / facts["temperature"]).softmax(1)
    own = [[one.probabilities[name] for name in model.label_names] for one in classify(given, module=model)]

    torch.testing.assert_close(found, torch.tensor(own), rtol=0, atol=1e-5)
    assert again.config.id2label == dict(enumerate(model.label_names))
    assert tokenizer.model_max_length == facts["text_length"] == 12


def test_the_exported_program_takes_any_batch_and_length(model, folder):
    program = torch.export.load(folder / "program.pt2").module()
    for rows, length in ((1, 2), (3, 12)):
        ids = torch.randint(5, 120, (rows, length))
        mask = torch.ones_like(ids)
        mask[-1, 1:] = 0
        with torch.no_grad():
            torch.testing.assert_close(program(ids, mask), model.probabilities(model(ids, mask)), rtol=0, atol=1e-5)


def test_adapters_are_merged_in_what_is_exported(build, tmp_path, tokenizer, batches):
    pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    from lightning_unified.models.classifier.data.tokens.text_encoder import TextEncoder

    model = build(labels=3, lora_rank=2).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.identity.encoder = TextEncoder(tokenizer)
    export(model, tmp_path, program=False)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ids, mask = batches[1]["input_ids"], batches[1]["attention_mask"]

    torch.testing.assert_close(again(ids, attention_mask=mask.long()).logits, model(ids, mask), rtol=1e-4, atol=1e-5)


def test_an_explanation_adds_up_and_finds_the_words_that_decide(model):
    pytest.importorskip("captum")
    found = explain(model, "b1 a1 a2 a3, a5", orders=40)

    assert found.label == "apples"
    assert found.converged
    assert sum(word.attribution for word in found.words) == pytest.approx(found.difference + found.delta, abs=1e-4)
    assert abs(found.delta) <= 0.05 * abs(found.difference)
    assert [word.text for word in found.words] == ["b1", "a1", "a2", "a3", ",", "a5"]
    apples = [word.attribution for word in found.words if word.text.startswith("a")]
    assert found.words[0].attribution < sum(apples) / len(apples)
    assert found.deletion.area > found.deletion.random_mean
    assert found.deletion.p_value <= 0.05


def test_the_coloured_text_is_the_text_and_the_page_escapes_it(model):
    pytest.importorskip("captum")
    text = "a1 <b>  b2 & a3 " + "a4 " * 20
    found = explain(model, text, orders=0)

    assert "".join(piece for piece, _ in segments(found)) == text
    assert max(abs(strength) for _, strength in segments(found)) == 1
    plain = terminal(found, colours=False)
    assert plain.spans == [] and re.search(r"\[[+-]1\.00\]", plain.plain)
    assert re.sub(r"\[[+-]\d\.\d\d\]", "", plain.plain) == terminal(found).plain == text
    assert "&lt;" in page([found])
    assert "<b>" not in page([found])


def test_the_command_explains_in_the_terminal_and_as_a_page(trained, tmp_path, capsys):
    pytest.importorskip("captum")
    (tmp_path / "one.txt").write_text("c1 c2 a3")
    page_at = tmp_path / "page.html"
    given = [
        "explain",
        "--checkpoint",
        str(trained),
        "--orders",
        "5",
        "--html",
        str(page_at),
        str(tmp_path / "one.txt"),
    ]

    assert main(given) == 0
    said = capsys.readouterr().out
    assert "clouds" in said
    assert "random orders" in said
    assert page_at.read_text().startswith("<!doctype html>")


@first_cells(
    3,
    ("arguments", "code", "message"),
    [
        (["predict", "here.txt", "--checkpoint", "none.ckpt"], 2, "there is no checkpoint none.ckpt"),
        (["predict", "no.txt", "--checkpoint", "TRAINED"], 2, "there is no file no.txt"),
        (
            ["predict", "here.csv", "--checkpoint", "TRAINED"],
            2,
            "has the columns words and no text; name the column, as in --field words",
        ),
        (
            ["predict", "empty.csv", "--checkpoint", "TRAINED"],
            2,
            "empty.csv is empty; its first line must name the columns",
        ),
        (["predict", "here.txt", "--checkpoint", "UNTRAINED"], 1, "saved before the first step of training"),
        (["predict", "here.txt", "--checkpoint", "here.txt"], 1, "cannot be read as a checkpoint"),
        (["explain", "here.txt", "--label", "apple", "--checkpoint", "TRAINED"], 2, "did you mean apples?"),
    ],
)
def test_what_cannot_be_done_is_said_and_has_its_exit_code(
    trained, tmp_path, monkeypatch, capsys, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("a1 a2")
    (tmp_path / "here.csv").write_text("words\na1\n")
    (tmp_path / "empty.csv").touch()
    saved = torch.load(trained, weights_only=True)
    torch.save({**saved, "global_step": 0}, tmp_path / "untrained.ckpt")
    names = {"TRAINED": str(trained), "UNTRAINED": "untrained.ckpt"}

    assert main([names.get(argument, argument) for argument in arguments]) == code
    assert message in capsys.readouterr().err


def test_predict_and_evaluate_read_a_table_as_training_did(trained, texts, tmp_path, capsys):
    saved = torch.load(trained, weights_only=True)
    saved["classifier"]["file_format"] = {"text": "message", "label": "kind", "encoding": "latin-1"}
    torch.save(saved, tmp_path / "own.ckpt")
    names = ["apples", "bears", "clouds"]
    lines = [f"{text};{names[label]}" for text, label in texts]
    table = tmp_path / "own.csv"
    table.write_bytes("\n".join(["message;kind", *lines, ";apples", "a1 für;", ""]).encode("latin-1"))
    own = ["--checkpoint", str(tmp_path / "own.ckpt"), str(table)]

    assert main(["predict", "--json", *own]) == 0
    said = capsys.readouterr()
    records = [json.loads(line) for line in said.out.splitlines()]
    assert [record["label"] for record in records[:-1]] == [names[label] for _, label in texts]
    assert records[-1]["source"] == f"{table}:27"
    assert said.err == f"1 of 26 texts are blank and get no label: {table}:26 …\n"

    assert main(["evaluate", "--save", str(tmp_path / "plots"), *own]) == 0
    said = capsys.readouterr().out
    assert "26 rows read, 24 evaluated; left out: 1 blank, 1 without a label" in said
    assert "accuracy 1.0000, macro f1 1.0000" in said
    assert "bears         8     1.0000  1.0000  1.0000" in said
    record = json.loads((tmp_path / "plots/evaluation.json").read_text())
    assert (record["macro_f1"], record["rows"], record["read"]) == (1.0, 24, 26)
    assert (tmp_path / "plots/evaluation.png").exists()


def test_evaluate_takes_the_rows_marked_as_test_and_refuses_other_classes(trained, tmp_path, capsys):
    table = tmp_path / "split.csv"
    table.write_text("body,class,split\na1 a2,apples,test\nb1 b2,apples,\nc1 c2,clouds,test\n")
    own = ["--checkpoint", str(trained), "--field", "body", str(table)]

    assert main(["evaluate", "--json", "--label-field", "class", *own]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["rows"], record["not_test"], record["accuracy"]) == (2, 1, 1.0)
    assert main(["evaluate", "--label-field", "split", *own]) == 2
    assert "the labels test are none of the classifier's, which are apples, bears, clouds" in capsys.readouterr().err
