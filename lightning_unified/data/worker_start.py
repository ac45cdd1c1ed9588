"""Start loader processes beside the training: the run makes its first batches itself.

A process that is not forked from the run imports torch first, and the run would wait for that. Processes by `forkserver` are forked from one
server, which imports torch for all of them.
"""

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing import forkserver
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

__all__ = ["RowsOfBatches", "WorkerOptions", "batches_of", "start_server"]

_IMPORTS = "torch.utils.data", "lightning_unified.data.loader"  # nothing that touches a device


class WorkerOptions(Protocol):
    """How many processes, and how they start; None for the system's own way."""

    @property
    def num_workers(self) -> int: ...

    @property
    def start_method(self) -> str | None: ...


class _Rows(Protocol):
    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]: ...


class RowsOfBatches:
    """A batch sampler: the rows of the batches that are left in an epoch, each given once.

    Attributes:
        started: The start of the loader's processes, in another thread; None where they started in none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.started: Future[Any] | None = None
        self.plan([])

    def plan(self, rows: list[list[int]]) -> None:
        """Set the rows of an iteration that begins now, after a start for the one before."""
        if self.started is not None:
            wait([self.started])
        self._left, self._is_taken, self._count = iter(rows), False, len(rows)

    def take(self) -> list[int] | None:
        """Return the rows of the next batch.

        None if the processes have begun to take batches, or none is left.
        """
        with self._lock:
            return None if self._is_taken else next(self._left, None)

    def __iter__(self) -> Iterator[list[int]]:
        with self._lock:  # reached once processes run: the loader asks for the first rows then
            self._is_taken = True
        yield from self._left

    def __len__(self) -> int:
        return self._count


def start_server(options: WorkerOptions) -> None:
    """Start the server of processes by `forkserver`, and import there what each would.

    It then imports while the run sets up. A server that runs already stays as it is, and modules that the user gave it come first.
    """
    if options.num_workers and (options.start_method or _systems_own()) == "forkserver":
        given = forkserver._forkserver._preload_modules  # pyright: ignore[reportAttributeAccessIssue]
        forkserver.set_forkserver_preload([*given, *(name for name in _IMPORTS if name not in given)])
        forkserver.ensure_running()


def batches_of(loader: DataLoader[Any], rows: _Rows, planned: list[list[int]]) -> Iterator[dict[str, Tensor]]:
    """Yield batches of a loader; while its processes start, make them here.

    Those made here are not in page-locked memory.

    Args:
        loader: Its batch sampler is a `RowsOfBatches`.
        rows: Its rows.
        planned: The row numbers of each batch.
    """
    left = loader.batch_sampler
    assert isinstance(left, RowsOfBatches)
    left.plan(planned)
    if not _starts_apart(loader):
        yield from loader
        return
    try:
        with ThreadPoolExecutor(1, initializer=_same_device(loader)) as pool:
            started = left.started = pool.submit(iter, loader)
            while not started.done() and (indices := left.take()) is not None:
                yield rows.__getitems__(indices)
        batches = started.result()
    finally:
        left.started = None
    yield from batches


def _starts_apart(loader: DataLoader[Any]) -> bool:
    """Return whether processes start now, and not by `fork`.

    A fork is fast, and unsafe beside other threads.
    """
    runs = loader.num_workers == 0 or loader._iterator is not None  # persistent processes start once
    context = loader.multiprocessing_context
    return not runs and (_systems_own() if context is None else context.get_start_method()) != "fork"


def _systems_own() -> str:
    """Return the start method that a process would have now; the user may still set another."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _same_device(loader: DataLoader[Any]) -> Any:
    """Return what sets the present device in another thread; None if no device matters.

    A loader locks pages for the device of the thread that starts it.
    """
    if loader.pin_memory and torch.accelerator.is_available():
        return partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
    return None
