"""The documentation names files, folders, modules and tests that exist."""

import functools
import importlib
import re

import pytest

from tests.support import ROOT

PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"}
)  # that one names what is gone
FOLDERS = ("benchmarks", "conf", "docs", "lightning_unified", "tests")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*\w/?")
MODULE = re.compile(r"(?<![\w./-])(?:lightning_unified|benchmarks|tests)(?:\.\w+)+")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")
BELOW = re.compile(r"`((?:\w+/)+(?:\w+\.py)?)`")  # `step/loop/optimization.py`, `hardware/host/`, `planner/finders.py`
PARENTS = ("lightning_unified", "benchmarks")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"(?<![\w/.])test_\w+")


def broken_paths(text: str) -> list[str]:
    """Return paths from the root, and paths below `PARENTS`, that do not exist."""
    known = {path.name for parent in PARENTS for path in (ROOT / parent).iterdir()}
    below = [path for path in BELOW.findall(text) if not path.startswith(FOLDERS) and path.split("/")[0] in known]
    return [
        *(path for path in PATH.findall(text) if not list(ROOT.glob(path.rstrip("/.")))),
        *(path for path in below if not any((ROOT / parent / path).exists() for parent in PARENTS)),
    ]


def broken_names(text: str) -> list[str]:
    return [name for name in MODULE.findall(text) if not _exists(name)]


@functools.cache
def known_tests() -> set[str]:
    """Return the names of all test functions and test files."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = (re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")) for file in files)
    return {file.stem for file in files}.union(*functions)


def broken_tests(text: str) -> list[str]:
    return [name for name in TEST.findall(BLOCK.sub("", text)) if name not in known_tests()]


def _exists(dotted: str) -> bool:
    """Return whether `dotted` is a module, or an attribute of a module of the package."""
    parts = ["conf"] if dotted == "lightning_unified.conf" else dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.is_dir() or path.with_suffix(".py").is_file():
            attributes = parts[length:]
            return not attributes or _has(importlib.import_module(".".join(parts[:length])), attributes)
    return False


def _has(found: object, attributes: list[str]) -> bool:
    return all((found := getattr(found, name, None)) is not None for name in attributes)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_exists(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link, _ in LINK.findall(text) if not (page.parent / link).exists()]

    assert (broken_paths(text), broken_names(text), broken_tests(text), links) == ([], [], [], [])


def test_a_missing_file_module_or_test_is_found():
    assert broken_tests("`test_that_is_gone` and test_docs") == ["test_that_is_gone"]
    assert broken_tests("```python\ntest_of_an_example\n```\n") == []
    assert broken_paths("see docs/nowhere.md and `step/nowhere.py`, not docs/explanation/layout.md") == [
        "docs/nowhere.md",
        "step/nowhere.py",
    ]
    assert broken_names("`lightning_unified.nowhere`, `lightning_unified.units`, `lightning_unified.plan`") == [
        "lightning_unified.nowhere"
    ]
