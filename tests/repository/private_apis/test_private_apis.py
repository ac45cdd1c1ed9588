"""docs/explanation/private_apis.md lists every private name that the source uses.

Every installed version of the other packages has these names.
"""

import importlib
import inspect
import re
from functools import cache
from typing import Any

import pytest

from tests.repository.private_apis.examples import CALLS, OPTIONAL, RESULTS, example
from tests.repository.private_apis.uses import uses
from tests.support import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs/explanation/private_apis.md").read_text("utf-8").splitlines()
    if line.startswith("| `")
]
NAMES = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])]


@cache
def used():
    """Return the imported names and the attributes: finding them takes seconds, which no collection should."""
    return uses(ROOT / "lightning_unified")


def test_every_private_name_in_the_source_is_listed():
    imported, attributes = used()
    parts = {part for name in NAMES for part in name.split(".")}
    missing = {name: files for name, files in imported.items() if name not in NAMES}
    missing |= {name: files for name, files in attributes.items() if name not in parts}

    assert not missing, "add a row to docs/explanation/private_apis.md, or use a public name"


def test_every_listed_name_is_used():
    imported, attributes = used()
    unused = [name for name in NAMES if name not in imported and name.rpartition(".")[2] not in attributes]

    assert not unused, "take it out of docs/explanation/private_apis.md"


def test_files_and_tests_of_the_rows_exist():
    assert all(len(row) == 5 for row in ROWS)
    for _, where, _, _, test in ROWS:
        for path in re.findall(r"`([^`]+)`", where):
            assert (ROOT / "lightning_unified" / path).exists()
        assert (ROOT / test.strip("` ")).exists()


def resolved(name: str) -> Any:
    first, *rest = name.split(".")
    found = example(first) if first[0].isupper() else importlib.import_module(first)
    for count, part in enumerate(rest, 1):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not inspect.ismodule(found):
                raise
            found = importlib.import_module(".".join((first, *rest[:count])))
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OPTIONAL])
def test_a_private_name_exists_and_takes_the_arguments_that_it_gets(name):
    found = resolved(name)

    if name in CALLS:
        count, keywords = CALLS[name]
        inspect.signature(found).bind(*[None] * count, **dict.fromkeys(keywords))
    if name in RESULTS:
        assert RESULTS[name](found)


def test_calls_belong_to_listed_names():
    assert {*CALLS, *RESULTS, *OPTIONAL} <= {*NAMES}


def test_an_unlisted_name_is_found(tmp_path):
    (tmp_path / "one.py").write_text(
        "import torch\n"
        "from lightning.pytorch.loops import _Loop as Loop\n"
        "class Own(Loop):\n"
        "    def _mine(self, trainer, other):\n"
        "        self._mine(torch._C._new(), other._mine, trainer.fit_loop._new_loader)\n"
        "        return super()._theirs, getattr(trainer, '_by_name', None), trainer.public\n",
        "utf-8",
    )

    imported, attributes = uses(tmp_path)

    assert set(imported) == {"lightning.pytorch.loops._Loop", "torch._C._new"}
    assert set(attributes) == {"_new_loader", "_theirs", "_by_name"}
