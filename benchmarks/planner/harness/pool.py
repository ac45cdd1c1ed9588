"""Run pieces of work in processes of their own, a dozen at a time.

They are forked from this process, so that they start at once.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Task", "look_at_gpu", "run_all"]

_ERROR_LETTERS = 400  # characters of an error that a record keeps


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A call to be made in a fresh process.

    Attributes:
        name: For whoever takes its result.
        work: What to call: a function of a module, for a process that is not forked has to find it.
        args: What to call it with.
        weight: Bytes of the device that it needs; tasks that run at once stay below the pool's capacity.
        seconds: After which it is killed.
    """

    name: str
    work: Callable[..., dict[str, Any]]
    args: tuple = ()
    weight: int = 0
    seconds: float = 120.0


@dataclass(kw_only=True)
class _Running:
    task: Task
    process: Any
    result: Path
    begun: float = field(default_factory=time.monotonic)


def run_all(
    tasks: Iterable[Task],
    *,
    jobs: int,
    done: Callable[[Task, dict[str, Any]], Iterable[Task] | None],
    capacity: int | None = None,
    start: str = "fork",
) -> None:
    """Run `tasks` in processes of their own, at most `jobs` at a time.

    Args:
        tasks: In the order in which they begin, where there is room.
        jobs: How many at once.
        done: Called with each task and what it gave, or `{"error": …}`; may return tasks that come next.
        capacity: Bytes that all that run at once may weigh; one too heavy for it runs alone.
        start: `"fork"`, which needs a parent that has not touched a GPU, or `"spawn"`, which takes seconds a task.
    """
    context = multiprocessing.get_context(start)
    waiting, running = list(tasks), []
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        try:
            while waiting or running:
                while (task := _next(waiting, running, jobs=jobs, capacity=capacity)) is not None:
                    running.append(_begin(task, context, Path(folder)))
                for ended in _ended(running):
                    running.remove(ended)
                    waiting[:0] = list(done(ended.task, _result(ended)) or ())
        finally:
            for one in running:
                one.process.kill()


def _next(waiting: list[Task], running: list[_Running], *, jobs: int, capacity: int | None) -> Task | None:
    if not waiting or len(running) >= jobs:
        return None
    used = sum(one.task.weight for one in running)
    for index, task in enumerate(waiting):
        if not running or capacity is None or used + task.weight <= capacity:
            return waiting.pop(index)
    return None


def _begin(task: Task, context: Any, folder: Path) -> _Running:
    result = Path(tempfile.mkdtemp(dir=folder)) / "result.json"
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(target=_run, args=(task.work, task.args, str(result)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries' idle threads, which a fork leaves behind
        process.start()
    return _Running(task=task, process=process, result=result)


def _run(work: Callable[..., dict[str, Any]], args: tuple, result: str) -> None:
    """Call, record the result, and exit without the parent's exit handlers."""
    folder = Path(result).parent
    os.environ["LIGHTNING_UNIFIED_STATE_DIR"] = str(folder / "state")  # these runs are nobody's to watch
    os.environ["LIGHTNING_UNIFIED_CACHE"] = str(folder / "cache")  # nothing is known of earlier runs
    os.chdir(folder)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        found = work(*args)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:_ERROR_LETTERS]}
    Path(result).write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _ended(running: list[_Running]) -> list[_Running]:
    """Wait for a process to end or a moment to pass.

    Kill those whose time is over; return those that ended.
    """
    multiprocessing.connection.wait([one.process.sentinel for one in running], timeout=0.2)
    for one in running:
        if time.monotonic() - one.begun > one.task.seconds:
            one.process.kill()
            one.process.join()
    return [one for one in running if not one.process.is_alive()]


def _result(ended: _Running) -> dict[str, Any]:
    ended.process.join()
    seconds = time.monotonic() - ended.begun
    try:
        found = json.loads(ended.result.read_text())
    except (OSError, ValueError):
        code = ended.process.exitcode
        late = seconds > ended.task.seconds
        how = f"no end after {ended.task.seconds:.0f} s" if late else f"exit code {code}"
        if not late and code is not None and code < 0:
            how = signal.Signals(-code).name
        found = {"error": f"{how}: {_tail(ended.result.parent / 'log')}"[:_ERROR_LETTERS]}
    shutil.rmtree(ended.result.parent, ignore_errors=True)
    return found


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return " / ".join(log.read_text(errors="replace").strip().splitlines()[-2:])
    return ""


def look_at_gpu() -> dict[str, Any]:
    """Return the GPU's description, read in another process.

    A process that has used the GPU cannot fork workers for it.
    """
    import torch

    properties = torch.cuda.get_device_properties(0)
    torch.ones(1, device="cuda")
    return {"gpu": properties.name, "bytes": properties.total_memory, "cuda": torch.version.cuda}
