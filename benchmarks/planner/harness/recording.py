"""Arguments and records of the planner's benchmark programs.

A record grows row by row, and a later run continues it. The GPU's name is read here too.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.planner.harness.pool import Task, look_at_gpu, run_all
from benchmarks.planner.zoo.hub import has_peft, has_transformers
from benchmarks.records import origin, write

__all__ = ["Progress", "Record", "begin", "errors", "measure", "parser"]


def parser(doc: str, *, name: str, jobs: int) -> argparse.ArgumentParser:
    """Return the arguments that all of these programs take."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--jobs", type=int, default=jobs, help=f"processes at a time (default: {jobs})")
    arguments.add_argument("--only", default="", help="rows whose name has this text in it")
    arguments.add_argument("--limit", type=int, help="this many rows at most")
    arguments.add_argument("--again", action="store_true", help="run rows that the record has with an error once more")
    arguments.add_argument("--output", type=Path, help=f"record (default: records/{name}_DEVICE.json beside this file)")
    arguments.add_argument("--summary", type=Path, metavar="FILE", help="print the tables of a record, and run nothing")
    arguments.set_defaults(name=name)
    return arguments


class Record:
    """Rows by name, written down whenever one is added.

    Args:
        path: Where; what is there already is kept.
        about: What was measured, with what: `what` and the machine.
        summarise: Makes figures of the rows, for the record's head.
    """

    def __init__(self, path: Path, *, about: dict[str, Any], summarise: Callable[[list[dict]], Any]) -> None:
        self._path, self._about, self._summarise = path, about, summarise
        self.rows = {row["cell"]: row for row in _rows(path)} if path.exists() else {}

    def lacks(self, key: str, *, again: bool = False) -> bool:
        """Return whether `key` is still to be measured."""
        row = self.rows.get(key)
        return row is None or (again and bool(errors(row)))

    def add(self, row: dict[str, Any]) -> None:
        """Take `row` in, print it as a line, and write all."""
        self.rows[row["cell"]] = row
        print(json.dumps(row, ensure_ascii=False), flush=True)
        self.save()

    def save(self) -> None:
        rows = list(self.rows.values())
        write({**self._about, "summary": self._summarise(rows), "runs": rows}, self._path)


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"]


def errors(row: dict[str, Any]) -> dict[str, str]:
    """Return what failed in a row, by part."""
    found = {part: value["error"] for part, value in row.items() if isinstance(value, dict) and "error" in value}
    return found | ({"": row["error"]} if "error" in row else {})


class Progress(Protocol):
    """A benchmark's use of its record: the first pieces of work, and their successors."""

    def begin(self) -> Iterable[Task]: ...

    def done(self, task: Task, result: dict[str, Any]) -> Iterable[Task]: ...


def measure(
    options: argparse.Namespace,
    *,
    what: str,
    summarise: Callable[[list[dict]], Any],
    tables: Callable[[list[dict]], Iterable[str]],
    progress: Callable[[Record, argparse.Namespace], Progress],
    start: str | None = None,
) -> int:
    """Run a benchmark from its command line to its tables, and return the exit status.

    With `--summary` it prints the tables of that record, and runs nothing.

    Args:
        options: As `parser` gives them.
        what: Is measured, for the record's head.
        summarise: Makes figures of the rows, for the record's head.
        tables: Makes Markdown of the rows.
        progress: Leads through the rows that the record lacks.
        start: How processes are started, as for `run_all`; None forks them where that can be done.
    """
    if options.summary is not None:
        print("\n\n".join(tables(_rows(options.summary))))
        return 0
    about, found, capacity = begin(options)
    record = Record(_output(options), about={"what": what, **about}, summarise=summarise)
    leader = progress(record, options)
    run_all(leader.begin(), jobs=options.jobs, done=leader.done, capacity=capacity, start=start or found)
    print("\n\n".join(["", *tables(list(record.rows.values()))]))
    return 0


def _output(options: argparse.Namespace) -> Path:
    folder = Path(__file__).parents[1] / "records"
    return (options.output or folder / f"{options.name}_{options.device}.json").absolute()


def begin(options: argparse.Namespace) -> tuple[dict[str, Any], str, int | None]:
    """Return a record's facts about the machine, and the bytes of all processes together.

    They include how processes start on the device.
    """
    _quieten()
    start, capacity = "fork", None
    about = origin(" ".join([f"python -m benchmarks.planner.{options.name}", *sys.argv[1:]]))
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the thread that autograd keeps for a GPU would count as growth
    else:
        gpu, start = _gpu()
        about["machine"]["gpu"] = gpu
        capacity = int(0.9 * gpu["bytes"])
    for library in ("transformers", "peft", "accelerate"):
        with_library = importlib.util.find_spec(library) is not None
        about["versions"][library] = importlib.metadata.version(library) if with_library else None
    return about, start, capacity


def _gpu() -> tuple[dict[str, Any], str]:
    """Return the GPU's name and size, and how processes can be started.

    They are forked if the imports have left the GPU alone.
    """
    found: list[dict[str, Any]] = []
    for start in ("fork", "spawn"):
        task = Task(name="gpu", work=look_at_gpu)
        run_all([task], jobs=1, done=lambda _task, result: found.append(result), start=start)
        if "error" not in found[-1]:
            if start == "spawn":
                print(f"Processes are spawned, which takes longer: a forked one said {found[0]['error']}", flush=True)
            return found[-1], start
    sys.exit(f"--device cuda needs a CUDA device that torch can use: {found[-1]['error']}")


def _quieten() -> None:
    """Compute in one thread, log little, and import for the forked processes."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or asking whether there is a GPU spoils it for forks
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if has_transformers():
        for name in ("models.llama.modeling_llama", "models.bert.modeling_bert"):
            importlib.import_module(f"transformers.{name}")
    if has_peft():
        importlib.import_module("peft")
