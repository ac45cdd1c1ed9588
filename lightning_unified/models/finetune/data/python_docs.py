"""Questions about Python's functions; the first paragraph of a docstring is the answer.

They ship with Python, so nothing is downloaded. The group of an example is its module. Functions that other libraries add to or
replace in these modules are left out, so the examples do not depend on the libraries that a process has imported.
"""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from lightning_unified.models.finetune.data.examples import Example

__all__ = ["python_docs"]

_MODULES = (
    "argparse", "ast", "bisect", "builtins", "calendar", "collections", "concurrent.futures", "configparser", "contextlib", "csv",
    "datetime", "decimal", "difflib", "email.message", "fractions", "functools", "glob", "gzip", "heapq", "html", "http.client", "inspect",
    "io", "ipaddress", "itertools", "json", "locale", "logging", "mailbox", "math", "operator", "os", "pathlib", "pickle", "platform",
    "queue", "random", "re", "shutil", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "timeit", "traceback", "unittest", "urllib.parse", "uuid", "weakref", "zipfile",
)  # fmt: skip
_REPLACED = frozenset({"inspect.getfile"})  # by torch.package
_SHORTEST, _LONGEST = 20, 400  # characters of an answer


def python_docs() -> list[Example]:
    """Return one conversation for each documented public function or method, sorted by name."""
    found: dict[str, Example] = {}
    answers: set[str] = set()
    for name in _MODULES:
        for path, thing in _documented(import_module(name), name):
            answer = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
            if path in _REPLACED or not _is_pythons_own(thing):
                continue
            if _SHORTEST <= len(answer) <= _LONGEST and answer not in answers:
                answers.add(answer)
                shown = path.removeprefix("builtins.")
                asked = {"role": "user", "content": f"What does Python's {shown} do?"}
                messages = (asked, {"role": "assistant", "content": answer})
                found[path] = Example(where=path, group=name, messages=messages)
    return [found[path] for path in sorted(found)]


def _documented(module: ModuleType, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the module's public functions, and the public methods of its classes, by path."""
    for own, thing in sorted(vars(module).items()):
        if own.startswith("_") or getattr(thing, "__module__", name) != name:
            continue
        if inspect.isclass(thing):
            for method, value in sorted(vars(thing).items()):
                if not method.startswith("_") and callable(value):
                    yield f"{name}.{own}.{method}", value
        elif callable(thing):
            yield f"{name}.{own}", thing


def _is_pythons_own(thing: Any) -> bool:
    module = getattr(thing, "__module__", None)
    return not module or str(module).partition(".")[0] in sys.stdlib_module_names
