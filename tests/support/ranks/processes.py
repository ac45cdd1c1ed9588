"""Run a function as two connected processes with a time limit, and return both results."""

import gc
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import CONTEXT

LIMIT_S = 240.0


class Ended:
    """A rank that raised, or whose process ended without a result."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


def on_ranks(function: Callable[..., Any], *args: Any, size: int = 2, limit_s: float = LIMIT_S) -> list[Any]:
    """Return the result of `function(*args)` on each rank, or an `Ended`.

    A rank that hangs fails the test.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, port, folder, function, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        if stuck:
            pytest.fail(f"ranks {stuck} still ran after {limit_s:.0f} s")
        return [_said(Path(folder, str(rank)), process.exitcode) for rank, process in enumerate(processes)]


def _said(path: Path, code: int | None) -> Any:
    if not path.exists():
        return Ended("Gone", f"exit code {code}")
    return pickle.loads(path.read_bytes())


def _rank(rank: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    gc.freeze()  # the server's objects: the collection after each shortage need not walk over them
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        result = function(*args)
    except Exception as error:
        if "RANKS_DEBUG" in os.environ:
            traceback.print_exc()
        result = Ended(type(error).__name__, str(error))
    new = Path(folder, f"{rank}.new")
    new.write_bytes(pickle.dumps(result))
    new.replace(Path(folder, str(rank)))
