"""Execute the tutorials, and check or store their outputs.

Usage: `python docs/tutorials/execute.py [NAME ...]` executes the named notebooks, or all, and writes their outputs into the files.
`--check` writes nothing and compares the outputs with the stored ones. Words must be equal, and numbers equal within 2 %. A cell's metadata
may allow more: `"within": 0.3`, or the tag `varies`, for which only the kinds of outputs are compared.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LARGEST = 300_000
"""Most bytes of a notebook's file."""
CELL_SECONDS = 3600  # a guard against hanging, also on a busy machine
PRIVATE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|work|mnt|Users|private)/[^\s'\")]*|\b[A-Z]:\\\S+")
_PLAIN = "import os; os.environ.pop('FORCE_COLOR', None); os.environ.pop('CLICOLOR_FORCE', None)"  # kernels set both
KEPT = {"tags", "within"}
VARIES = "varies"
WITHIN = 0.02
_EXCERPT = 300  # characters of an unexpected output that are shown
ROUNDING = 1e-5
"""Numbers below this are differences by rounding, equal to each other."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_TIME_OF_THIS_RUN = re.compile(
    r"^(?:. Predicted in [\d.]+ (?:ms|s|min)\.|[\w' ]+: (?:[\d.]+ (?:ms|s|min|h) ?)+|[\w' ]+ … .*)$"
)
_DRAWN = re.compile("[\u2580-\u259f#]+")  # bars of a table


def notebooks(names: list[str] | None = None) -> list[Path]:
    """Return the named tutorials, or all of them in their order."""
    known = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    unknown = [name for name in names or () if Path(name).stem not in known]
    if unknown:
        raise SystemExit(f"No tutorial is named {', '.join(unknown)}; there are {', '.join(known)}.")
    return [known[Path(name).stem] for name in names or known]


def execute(path: Path) -> dict[str, Any]:
    """Return the notebook with the outputs of a new kernel, in an empty directory.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
    """
    import nbformat  # the fast tests run without it
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as work, _environment(Path(work)):
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": work}},
        )
        client.extra_arguments = ["--log-level=ERROR", f"--IPKernelApp.exec_lines={_PLAIN}"]
        client.execute()
    nbformat.validate(notebook)
    return _plain(json.loads(nbformat.writes(notebook)))


@contextmanager
def _environment(work: Path) -> Iterator[None]:
    """Start kernels with this interpreter's programs, an empty cache, and no colours."""
    before = dict(os.environ)
    os.environ.update(
        PATH=os.pathsep.join([str(Path(sys.executable).parent), before.get("PATH", "")]),
        LIGHTNING_UNIFIED_CACHE=str(work / ".cache"),
        LIGHTNING_UNIFIED_STATE_DIR=str(work / ".state"),
        PYTHONWARNINGS="ignore::FutureWarning,ignore::DeprecationWarning,ignore:IProgress",
        NO_COLOR="1",
        COLUMNS="100",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _plain(notebook: dict[str, Any]) -> dict[str, Any]:
    """Drop what changes with each machine, such as the kernel's version, and add the digest of the code."""
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        "executed": _digest(notebook),
    }
    for number, cell in enumerate(notebook["cells"]):
        cell["id"] = f"cell-{number:02d}"
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key in KEPT}
    return notebook


def _digest(notebook: dict[str, Any]) -> str:
    """Return a digest of all code, to tell whether the outputs are those of the cells."""
    code = ["".join(cell["source"]) for cell in _code(notebook)]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def _code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored(path: Path) -> dict[str, Any]:
    """Return a notebook as its file holds it."""
    return json.loads(path.read_text(encoding="utf-8"))


def faults(path: Path) -> list[str]:
    """Return what is wrong with a stored notebook, in words."""
    notebook = stored(path)
    cells = _code(notebook)
    found = []
    if path.stat().st_size > LARGEST:
        found.append(f"{path.stat().st_size} bytes, of at most {LARGEST}")
    if [cell["execution_count"] for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("the cells were not executed once each in their order")
    if notebook["metadata"].get("executed") != _digest(notebook):
        found.append("a cell has changed since the notebook was executed")
    for cell in cells:
        number, outputs = cell["execution_count"], cell["outputs"]
        found += [f"cell {number} ends in {out['ename']}" for out in outputs if out["output_type"] == "error"]
        found += [f"cell {number} shows a path of a machine: {name}" for name in _paths(outputs)]
    return found


def _paths(outputs: list[dict[str, Any]]) -> list[str]:
    texts = [text for output in outputs for kind, text in _texts(output) if not kind.startswith("image/")]
    return [name for text in texts for name in PRIVATE.findall(text)]


def _texts(output: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kinds of an output, each with its text, without lines that only give this run's time."""
    if "text" in output:
        lines = "".join(output["text"]).splitlines(keepends=True)
        if kept := "".join(line for line in lines if not _TIME_OF_THIS_RUN.match(line)).strip():
            yield output["name"], kept
    for kind, text in output.get("data", {}).items():
        yield kind, "".join(text)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return how the outputs of an executed notebook differ from the stored ones, in words."""
    found = []
    for old, new in zip(_code(before), _code(after), strict=True):
        shown, now = ([pair for output in cell["outputs"] for pair in _texts(output)] for cell in (old, new))
        number, metadata = new["execution_count"], old["metadata"]
        if [kind for kind, _ in shown] != [kind for kind, _ in now]:
            kinds = f"{[kind for kind, _ in now]} instead of {[kind for kind, _ in shown]}"
            new_texts = [text for kind, text in now if kind not in dict(shown) and "image/" not in kind]
            found.append(" ".join([f"cell {number} shows {kinds}", *(f"({text[:_EXCERPT]})" for text in new_texts)]))
        elif VARIES not in metadata.get("tags", ()):
            pairs = [(text, other) for (kind, text), (_, other) in zip(shown, now, strict=True) if "image/" not in kind]
            unlike = [_unlike(*pair, metadata.get("within", WITHIN)) for pair in pairs]
            found += [f"cell {number} shows {difference}" for difference in unlike if difference]
    return found


def _unlike(text: str, other: str, within: float) -> str:
    """Return the first part of `other` that `text` lacks, and the part in its place; "" if none.

    Numbers are alike up to a share of `within`.
    """
    for part, now in zip_longest(_parts(text), _parts(other), fillvalue="nothing"):
        numbers = [[float(found.replace(",", "")) for found in _NUMBER.findall(each)] for each in (part, now)]
        near = all(abs(a - b) <= max(within * max(abs(a), abs(b)), ROUNDING) for a, b in zip(*numbers, strict=False))
        if not near or _NUMBER.sub("0", part) != _NUMBER.sub("0", now):
            return f"{now!r} instead of {part!r}"
    return ""


def _parts(text: str) -> list[str]:
    """Return the words of a text: bars and the lengths of blanks do not count."""
    return _DRAWN.sub(" ", text).split()


def main() -> int:
    """Execute the tutorials; return 1 if one is at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks; default: all")
    parser.add_argument("--check", action="store_true", help="compare with the stored outputs, and write nothing")
    options = parser.parse_args()
    failed = False
    for path in notebooks(options.names):
        notebook = execute(path)
        found = differences(stored(path), notebook) if options.check else []
        if not options.check:
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
        found += faults(path)
        failed |= bool(found)
        print(f"{path.name}: {'; '.join(found) or 'ok'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
