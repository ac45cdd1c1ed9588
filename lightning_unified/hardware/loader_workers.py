"""Decide the number of loader processes of a run, and say why."""

from dataclasses import dataclass
from typing import Literal

from lightning_unified.units import GIB, MIB, format_bytes

__all__ = ["BatchWork", "LoaderWorkers", "decide_workers", "default_start_method"]

BatchWork = Literal["gather", "compute", "unknown"]
"""Work of a batch: a look-up in arrays in memory, a computation of about a step's time, or not known."""

_PROCESS = 158 * MIB  # a spawned process's own memory before its rows: benchmarks/overhead/loader_workers.json
_SHARE = 0.05  # judgement: the most that loader processes may take of the host's memory
_ROOMY, _LARGE = (
    16 * GIB,
    32 * GIB,
)  # judgement: hosts with room for two processes and for four beside a model on one pool
_MOST = 8  # judgement: more processes than this wait for each other's copies


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderWorkers:
    """The loader processes of a run.

    Attributes:
        count: Number of processes.
        reason: Why, in one line.
    """

    count: int
    reason: str


def default_start_method(backend: str) -> str:
    """Return the start method of loader processes on a backend.

    A forked process would inherit a GPU context and touch its pages; macOS's own default is spawn.
    """
    if backend == "cpu":
        return "fork"
    return "spawn" if backend == "mps" else "forkserver"


def decide_workers(
    *,
    backend: str,
    pool: str,
    cores: int,
    host_bytes: int | None,
    start_method: str,
    work: BatchWork = "unknown",
    rows_bytes: int = 0,
) -> LoaderWorkers:
    """Return the number of loader processes for a machine and a kind of data.

    Args:
        backend: The device's backend: `"cpu"`, `"cuda"`, `"rocm"`, `"mps"` or `"xpu"`.
        pool: Its pool: `"unified"`, `"dedicated"` or `"host"`.
        cores: Performance cores that this process may use.
        host_bytes: Memory of the host; None if unknown.
        start_method: How a process starts: `"fork"`, `"forkserver"` or `"spawn"`.
        work: The work of a batch.
        rows_bytes: Bytes of the rows, which each process that is not forked gets a copy of; 0 if unknown.
    """
    if backend == "cpu":
        return _on_cpu(cores, work)
    own_pool = pool == "dedicated"
    if work == "gather" and not own_pool:
        return LoaderWorkers(
            count=0, reason=f"a batch is a look-up in memory, and processes by {start_method} would share the model's"
        )
    if cores < 4:
        return LoaderWorkers(count=int(own_pool), reason=f"{cores} cores leave few beside the training process")
    if work == "gather":
        most, reason = 2, "a batch is a look-up in memory, so two processes keep up with the card"
    elif own_pool:
        most, reason = min(_MOST, cores // 2), "half of the cores, as the card has a memory of its own"
    else:
        most, reason = _on_one_pool(host_bytes, cores, work)
    fits = _that_fit(host_bytes, start_method, rows_bytes)
    if fits < most:
        each = format_bytes(_PROCESS + rows_bytes)
        reason = f"each process by {start_method} takes {each}, and {fits} of them keep within {_SHARE:.0%} of the host's memory"
    return LoaderWorkers(count=min(most, fits), reason=reason)


def _on_cpu(cores: int, work: BatchWork) -> LoaderWorkers:
    if work == "gather":
        return LoaderWorkers(count=0, reason="a batch is a look-up in memory, and all cores train")
    if cores < 4:
        return LoaderWorkers(count=0, reason=f"all {cores} cores train")
    return LoaderWorkers(count=1, reason=f"one beside a training process on {cores} cores")


def _on_one_pool(host_bytes: int | None, cores: int, work: BatchWork) -> tuple[int, str]:
    """Return the most processes that share memory with the model, and why."""
    if host_bytes is None or host_bytes < _ROOMY:
        return 0, f"they share {format_bytes(host_bytes)} with the model"
    if work == "compute" and host_bytes >= _LARGE:
        return min(4, cores), f"batches are computed, and {format_bytes(host_bytes)} have room for four"
    return 2, f"two share {format_bytes(host_bytes)} with the model"


def _that_fit(host_bytes: int | None, start_method: str, rows_bytes: int) -> int:
    if start_method == "fork" or host_bytes is None:
        return _MOST  # forked processes share the rows
    return int(_SHARE * host_bytes // (_PROCESS + rows_bytes))
