"""Execute the tutorials, and check or store their outputs.

Usage: `python docs/tutorials/execute.py [NAME ...]` executes the named notebooks, or all, and writes their outputs into the files.
`--quick` executes them with fewer steps and writes nothing: a cell whose metadata has `quick` runs these lines after its own.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
LARGEST = 300_000
"""Most bytes of a notebook's file."""
CELL_SECONDS = 900
PRIVATE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|work|mnt|Users|private)/[^\s'\")]*|\b[A-Z]:\\\S+")
_PLAIN = "import os; os.environ.pop('FORCE_COLOR', None); os.environ.pop('CLICOLOR_FORCE', None)"  # kernels set both
KEPT = {"tags", "quick"}


def notebooks(names: list[str] | None = None) -> list[Path]:
    """Return the named tutorials, or all of them in their order."""
    known = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    unknown = [name for name in names or () if Path(name).stem not in known]
    if unknown:
        raise SystemExit(f"No tutorial is named {', '.join(unknown)}; there are {', '.join(known)}.")
    return [known[Path(name).stem] for name in names or known]


def execute(path: Path, *, quick: bool) -> NotebookNode:
    """Return the notebook with the outputs of a new kernel, in an empty directory.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    if quick:
        for cell in notebook.cells:
            cell.source += f"\n{cell.metadata.quick}" if "quick" in cell.metadata else ""
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
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
    return _plain(notebook)


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


def _plain(notebook: NotebookNode) -> NotebookNode:
    """Drop what changes with each machine, such as the kernel's version, and add the digest of the code."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        "executed": _digest(notebook),
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {key: value for key, value in cell.metadata.items() if key in KEPT}
    return notebook


def _digest(notebook: NotebookNode) -> str:
    """Return a digest of all code, to tell whether the outputs are those of the cells."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def faults(path: Path) -> list[str]:
    """Return what is wrong with a stored notebook, in words."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = []
    if path.stat().st_size > LARGEST:
        found.append(f"{path.stat().st_size} bytes, of at most {LARGEST}")
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("the cells were not executed once each in their order")
    if notebook.metadata.get("executed") != _digest(notebook):
        found.append("a cell has changed since the notebook was executed")
    for cell in cells:
        found += [f"cell {cell.execution_count} ends in {output.ename}" for output in cell.outputs if _failed(output)]
        found += [f"cell {cell.execution_count} shows a path of a machine: {name}" for name in _paths(cell.outputs)]
    return found


def _failed(output: NotebookNode) -> bool:
    return output.output_type == "error"


def _paths(outputs: list[NotebookNode]) -> list[str]:
    texts = [str(text) for output in outputs for kind, text in _texts(output) if not kind.startswith("image/")]
    return [name for text in texts for name in PRIVATE.findall(text)]


def _texts(output: NotebookNode) -> Iterator[tuple[str, str]]:
    yield "text/plain", output.get("text", "")
    yield from output.get("data", {}).items()


def main() -> int:
    """Execute the tutorials; return 1 if one is at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer steps, and write nothing")
    options = parser.parse_args()
    failed = False
    for path in notebooks(options.names):
        notebook = execute(path, quick=options.quick)
        if not options.quick:
            path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        found = faults(path)
        failed |= bool(found)
        print(f"{path.name}: {'; '.join(found) or 'ok'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
