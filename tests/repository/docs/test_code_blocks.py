"""Every code block of the manual runs, or is checked, or says why not."""

import json
import warnings
from contextlib import contextmanager

import pytest
import yaml

from pytest_lightning_unified import budgeted
from tests.repository.docs.blocks import PAGES, blocks, blocks_of
from tests.repository.docs.commands import commands_of, problem_of
from tests.support.lanes import slow

PYTHON_PAGES = sorted({block.page for block in blocks("python")})
EXTRAS = {"peft", "transformers"}
LONG = {"classifier_data"}  # pages whose code takes seconds
LANGUAGES = {"python", "bash", "text", "json", "yaml", "diff", "toml"}


def test_every_block_names_a_language():
    unnamed = [
        block.place
        for page in PAGES
        for block in blocks_of(page.read_text(encoding="utf-8"), page)
        if block.language not in LANGUAGES
    ]

    assert unnamed == [], f"a fenced block needs one of {', '.join(sorted(LANGUAGES))}"


@contextmanager
def skipped_without_extras():
    """Skip a page whose packages or data files belong to an extra that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        pytest.skip(f"{error.name} is not installed")
    except FileNotFoundError as error:
        if "pip install --no-deps" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "page", [slow(page) if page.stem in LONG else page for page in PYTHON_PAGES], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    for block in blocks("python"):
        if block.page != page:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(block.setup, f"setup of {block.place}", "exec"), names)
            code = compile(block.code, block.place, "exec")
            if not block.not_run:
                with skipped_without_extras():
                    exec(code, names)
    for name in [name for name in names if name.startswith("test_")]:  # a page shows tests with the plugin's fixture
        names[name](budgeted)


def test_every_command_parses_and_composes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    checked = [(block, words) for block in blocks("bash") if not block.not_run for words in commands_of(block.code)]
    problems = [
        f"{block.place}: {' '.join(words)}: {problem}" for block, words in checked if (problem := problem_of(words))
    ]

    assert len(checked) > 50
    assert problems == [], "\n" + "\n".join(problems)


def test_data_in_blocks_is_valid():
    for block in blocks("json"):
        json.loads(block.code)
    for block in blocks("yaml"):
        yaml.safe_load(block.code)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("python train.py memory=smal", "smal"),
        ("python train.py data.batchsize=4", "batchsize"),
        ("python train.py memory=small,large", "sweep"),
        ("python train.py --multirn", "--multirn"),
        ("lightning-unified plan --fit-where", "--fit-where"),
        ("python -m lightning_unified doctor --jsn", "--jsn"),
        ("python -m lightning_unified.models.gearhead infr", "infr"),
        ("python -m benchmarks.nowhere", "no such module"),
        ("python benchmarks/nowhere.py", "no such file"),
        ("make trian", "no such target"),
        ('make train ARGS="memory=smal"', "smal"),
        ("pip install 'lightning-unified[modls]'", "modls"),
        ("frobnicate", "no program"),
    ],
)
def test_a_wrong_command_is_found(command, problem):
    (words,) = commands_of(command)

    assert problem in problem_of(words)


def test_commands_are_read_as_a_shell_reads_them():
    code = "OMP_NUM_THREADS=1 python train.py seed=1 \\\n  name=x  # two lines\ncat a.txt | python b.py && make test > log\n"

    assert list(commands_of(code)) == [
        ["python", "train.py", "seed=1", "name=x"],
        ["cat", "a.txt"],
        ["python", "b.py"],
        ["make", "test"],
    ]
    assert list(commands_of("$ make test\nwritten\n")) == [["make", "test"]]


def test_comments_before_a_block_belong_to_it():
    text = "<!-- not run: needs two GPUs -->\n```python\na\n```\n\n<!-- setup\nb = 1\n-->\n```python\nb\n```\n"
    first, second = blocks_of(text)

    assert (first.not_run, first.setup, first.code) == ("needs two GPUs", "", "a\n")
    assert (second.not_run, second.setup.strip(), second.line) == ("", "b = 1", 9)
