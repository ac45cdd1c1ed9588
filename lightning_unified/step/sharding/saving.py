"""Save a distributed checkpoint: all ranks write into a folder that is whole or absent."""

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from lightning_unified.errors import CheckpointError
from lightning_unified.files.atomic import PARTIAL, publish, put_back, remove
from lightning_unified.files.pages import opened_uncached
from lightning_unified.files.sharded_folder import META, ShardedFolderError, check_pieces, divided
from lightning_unified.files.written import UncachedFile
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.step.ranks.consensus import Point, Ranks
from lightning_unified.step.recovery.checkpoint_io import failures_named
from lightning_unified.step.recovery.oom import release_cached_memory

__all__ = ["save_folder"]

_ATTEMPTS = 2  # judgement: caches are cleared before the second one
_IS_PARTIAL = re.compile(rf"^\.(?P<name>.+)@(?P<host>[^@]+)@(?P<pid>\d+){re.escape(PARTIAL)}$")


def save_folder(checkpoint: Mapping[str, Any], path: str | Path, ranks: Ranks, *, device: torch.device) -> None:
    """Write `checkpoint` into the folder `path`: each rank its rows. All ranks call it.

    The ranks write into a folder beside `path`. The first one flushes it and gives it its name after all ranks have finished. Until
    then an earlier checkpoint at `path` is whole. What the first rank holds is saved of all that is not sharded.

    Args:
        checkpoint: The checkpoint; sharded tensors are DTensors, anywhere in it.
        path: The folder; that of the first rank counts. All ranks must see it.
        ranks: The ranks.
        device: The device whose caches are cleared if memory runs out.

    Raises:
        CheckpointError: On all ranks, if one of them could not write its part.
        RankError: If a rank is gone.
    """
    target = Path(ranks.broadcast_object(str(path), source=0)).absolute()
    parts = divided(checkpoint, is_piece=lambda tensor: isinstance(tensor, DTensor))
    first = ranks.rank == 0
    tensors = {name: one for name, one in parts.tensors.items() if first or isinstance(one, DTensor)}
    _refuse_others(ranks, parts.tensors, target)
    unnamed = target.with_name(f".{target.name}@{socket.gethostname()}@{os.getpid()}{PARTIAL}")
    unnamed = Path(ranks.broadcast_object(str(unnamed), source=0))
    try:
        _by_first(ranks, target, partial(_begin, unnamed, target, parts.rest))
        _write_pieces(tensors, unnamed, ranks, target=target, device=device)
        _by_first(ranks, target, partial(_finish, unnamed, target))
    finally:
        if first:
            with suppress(OSError):  # a rank that is gone may still write there
                remove(unnamed)


def _refuse_others(ranks: Ranks, tensors: Mapping[str, Tensor], target: Path) -> None:
    """Raise `CheckpointError` on all ranks if they hold different sharded tensors."""
    names = "\n".join(f"{name} {tuple(one.shape)}" for name, one in tensors.items() if isinstance(one, DTensor))
    words = ranks.meet(Point.SAVING, digest=zlib.crc32(names.encode()))
    other = next((word.rank for word in words if word.digest != words[0].digest), None)
    if other is not None:
        raise CheckpointError(
            f"could not write the checkpoint {target}: rank {other} holds other sharded tensors than rank 0. Change the checkpoint alike on "
            "all ranks (on_save_checkpoint), or give save_distributed_checkpoint=False."
        )


def _by_first(ranks: Ranks, target: Path, work: Callable[[], None]) -> None:
    """Let the first rank work while the others wait; all of them raise its error."""
    failure = None
    if ranks.rank == 0:
        try:
            with failures_named(target):
                work()
        except CheckpointError as error:
            failure = str(error)
    failure = ranks.exchange(Point.SAVING, failure)[0]
    if failure is not None:
        raise CheckpointError(failure)


def _begin(unnamed: Path, target: Path, rest: dict[str, Any]) -> None:
    """Make the folder, and write what is no piece of a tensor; remove what killed ranks left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    put_back(target)
    for path in target.parent.glob(f".*{PARTIAL}"):
        found = _IS_PARTIAL.match(path.name)
        if found is not None and (found["name"] == target.name or _has_ended(found["host"], int(found["pid"]))):
            remove(path)
    unnamed.mkdir()
    with UncachedFile(unnamed / META) as file:
        torch.save(rest, file)  # pyright: ignore[reportArgumentType]


def _has_ended(host: str, pid: int) -> bool:
    return host == socket.gethostname() and not psutil.pid_exists(pid)


def _write_pieces(
    tensors: dict[str, Tensor], unnamed: Path, ranks: Ranks, *, target: Path, device: torch.device
) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        failures = _written(tensors, unnamed, ranks)
        if not failures:
            break
        short = all(is_out_of_memory(error) for error in failures.values())
        if short and attempt < _ATTEMPTS:
            release_cached_memory(device)
            continue
        rank, error = min(failures.items())
        if short:
            raise CheckpointError(
                f"could not write the checkpoint {target}: memory ran out on rank {rank} ({error}); an earlier one of that name is untouched. "
                "Leave more memory free beside the budget."
            )
        try:
            with failures_named(target):
                raise error
        except CheckpointError as named:
            raise CheckpointError(f"{named} [rank {rank}]") from error


def _written(tensors: dict[str, Tensor], unnamed: Path, ranks: Ranks) -> dict[int, Exception]:
    """Write this rank's pieces; return the errors of all ranks."""
    try:
        with ranks.losses_named():
            save(
                tensors,
                storage_writer=_Writer(unnamed),
                planner=DefaultSavePlanner(),
                process_group=ranks.sockets,
            )
    except CheckpointException as error:
        failures: dict[int, Exception] = {}
        for rank, (each, _) in error.failures.items():
            if not isinstance(each, Exception):
                raise each from None  # an interrupt
            failures[rank] = each
        return failures
    return {}


class _Writer(FileSystemWriter):
    """Torch's writer, whose files leave the page cache once they are on the disk."""

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done = super().write_data(plan, planner)
        for name in sorted({result.storage_data.relative_path for result in done.value()}):
            with opened_uncached(Path(self.checkpoint_id) / name):
                pass
        return done


def _finish(unnamed: Path, target: Path) -> None:
    try:
        check_pieces(unnamed)
    except ShardedFolderError as error:
        raise FileNotFoundError(
            f"the first rank does not see the files of all ranks ({error}): all machines must share the folder, or give "
            "save_distributed_checkpoint=False"
        ) from error
    publish(unnamed, target)
