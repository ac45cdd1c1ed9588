"""The tutorials are stored with the outputs of a whole run, and their cells run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "tutorials"
STORED = sorted(FOLDER.glob("*.ipynb"))
LONG = {"02_classifier", "03_plan_machines"}  # they start a program for each command
NEEDED = {"02_classifier": ("transformers", "captum"), "04_grpo": ("transformers",)}


def names(paths):
    return [path.stem for path in paths]


def prose(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


def test_each_tutorial_begins_with_its_title_and_says_what_it_needs():
    opened = {path.stem: prose(path)[0] for path in STORED}

    assert len(opened) == 5
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in names(STORED)]
)
def test_the_cells_of_a_tutorial_run(name):
    for package in ("nbclient", "ipykernel", *NEEDED.get(name, ())):
        pytest.importorskip(package)
    program = [sys.executable, str(FOLDER / "execute.py"), "--quick", name]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=500)

    assert (done.returncode, done.stdout) == (0, f"{name}.ipynb: ok\n"), done.stderr[-2000:]


def tutorials():
    """Return the module docs/tutorials/execute.py."""
    pytest.importorskip("nbclient")
    sys.path.insert(0, str(FOLDER))
    try:
        import execute
    finally:
        sys.path.remove(str(FOLDER))
    return execute
