"""Tutorials are stored with the outputs of a whole run; `make tutorials` compares them."""

import copy
import json
import sys

import pytest

from tests.support import ROOT

FOLDER = ROOT / "docs" / "tutorials"
STORED = sorted(FOLDER.glob("*.ipynb"))


def names(paths):
    return [path.stem for path in paths]


def prose(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


def test_each_tutorial_begins_with_its_title_and_says_what_it_needs():
    opened = {path.stem: prose(path)[0] for path in STORED}

    assert len(opened) == 6
    assert [name for name, text in opened.items() if not text.startswith("# ") or "You need" not in text] == []


@pytest.mark.parametrize("path", STORED, ids=names(STORED))
def test_links_between_tutorials_exist(path):
    links = [part.partition(")")[0] for text in prose(path) for part in text.split("](")[1:]]

    assert [link for link in links if "://" not in link and not (FOLDER / link).exists()] == []


@pytest.mark.parametrize("path", STORED, ids=names(STORED))
def test_a_stored_tutorial_is_small_whole_and_names_no_machine(path):
    execute = tutorials()

    assert execute.faults(path) == []


def test_faults_of_a_stored_tutorial_are_found(tmp_path):
    execute = tutorials()
    notebook = json.loads(STORED[0].read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code[0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "/home/someone/runs\n"}]
    code[1]["outputs"] = [{"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}]
    code[2]["execution_count"] = 1
    code[3]["source"] += "\nSTEPS = 7"
    broken = tmp_path / "broken.ipynb"
    broken.write_text(json.dumps(notebook), encoding="utf-8")

    assert execute.faults(broken) == [
        "the cells were not executed once each in their order",
        "a cell has changed since the notebook was executed",
        "cell 1 shows a path of a machine: /home/someone/runs",
        "cell 2 ends in ValueError",
    ]


def test_each_tutorial_has_outputs_to_compare():
    for path in STORED:
        outputs = [cell.get("outputs") for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]

        assert sum(map(bool, outputs)) >= 6


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("loss 0.764", "loss 0.771", ""),
        ("loss 0.764", "loss 0.864", "'0.864' instead of '0.764'"),
        ("loss 0.764", "loss nan", "'nan' instead of '0.764'"),
        ("difference 1e-07", "difference  3e-07", ""),
        ("difference 1e-07", "difference 1e-03", "'1e-03' instead of '1e-07'"),
        ("in 4,096 rows", "in 4,095 rows", ""),
        ("in 4,096 rows", "in 2,048 rows", "'2,048' instead of '4,096'"),
        ("peak 30 GiB ███▌", "peak 30 GiB ███", ""),
        ("recoveries: 1", "recoveries: 1 of 2", "'of' instead of 'nothing'"),
        ("yes\n· Predicted in 5.53 s.\n", "yes\n· Predicted in 31 s.\n", ""),
        ("fits", "fits\ncomparing whole and split rows: 4.46 s\n", ""),
        ("12.8 s predicted", "10.8 s predicted", "'10.8' instead of '12.8'"),
        ("done", "", "[] instead of ['stdout']"),
    ],
)
def test_a_changed_output_is_found(before, after, found):
    def shown(text, **metadata):
        output = {"output_type": "stream", "name": "stdout", "text": text}
        return {"cells": [{"cell_type": "code", "execution_count": 1, "metadata": metadata, "outputs": [output]}]}

    differences = tutorials().differences

    assert differences(shown(before), shown(after)) == [f"cell 1 shows {found}"] * bool(found)
    assert differences(shown(before, within=3), shown(before)) == []
    if after:
        assert differences(shown(before, tags=["varies"]), shown(after)) == []


def test_a_stored_tutorial_differs_from_one_with_another_figure():
    stored = json.loads((FOLDER / "05_hydra.ipynb").read_text(encoding="utf-8"))
    changed = copy.deepcopy(stored)
    texts = [output for cell in changed["cells"] for output in cell.get("outputs", []) if "20 steps" in str(output)]
    texts[0]["text"] = ["20 steps, loss 0.2\n"]

    assert tutorials().differences(stored, stored) == []
    assert [found.partition(" ")[2] for found in tutorials().differences(stored, changed)] == [
        "6 shows '0.2' instead of '0.0879'"
    ]


def tutorials():
    """Return the module docs/tutorials/execute.py."""
    sys.path.insert(0, str(FOLDER))
    try:
        import execute
    finally:
        sys.path.remove(str(FOLDER))
    return execute
