"""Checkpoint files that are whole or absent."""

import errno
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from lightning_unified.errors import CheckpointError
from lightning_unified.files.atomic import put_back, remove, written_beside
from lightning_unified.files.mapped import load_mapped, owned_below
from lightning_unified.files.written import UncachedFile
from lightning_unified.step.recovery.oom import caught, release_cached_memory
from lightning_unified.units import format_bytes

__all__ = [
    "AtomicCheckpointIO",
    "failures_named",
    "is_local",
    "load_folder",
    "saves_in_thread",
    "wait_for_writers",
]

_COPIED_OUT = {"state_dict", "optimizer_states"}  # entries that the strategy copies; other code may keep the rest


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves with `torch.save` so that a reader sees the old file or the new one, never a part.

    Lightning's own IO serialises the whole checkpoint into memory, then copies it again to write it. That takes twice
    the size of model and optimizer state, in a pool that may have no room for it. Here tensors go to the file one after
    another.

    Paths that are not local (`s3://…`) are left to Lightning's IO.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`; if memory runs out, clear caches and write once more.

        Raises:
            TypeError: If `storage_options` is given for a local file, which has none.
            CheckpointError: If the file could not be written; an earlier file at `path` is still there.
        """
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        target = Path(path)

        def write() -> None:
            with written_beside(target) as partial, UncachedFile(partial) as file:
                torch.save(checkpoint, file)  # pyright: ignore[reportArgumentType]

        with failures_named(target):
            _, memory_ran_out = caught(write)
            if memory_ran_out is not None:
                release_cached_memory(torch.accelerator.current_accelerator() or torch.device("cpu"))
                write()

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the checkpoint at `path`; tensors of a local file are mapped.

        These are the tensors of weights and optimizer states.

        The unified strategies copy them out piece by piece, so that file pages and values are never both in memory. With
        another strategy on the CPU, optimizer states stay in the file's pages until the optimizer writes them.

        Raises:
            FileNotFoundError: If there is no such file.
            CheckpointError: If the file is damaged, or holds objects that torch only loads from a trusted source.
        """
        if is_local(path) and put_back(Path(path)) and Path(path).is_dir():
            return load_folder(path, weights_only=weights_only)
        try:
            if not is_local(path) or not Path(path).is_file():
                return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
            checkpoint = load_mapped(path, map_location=map_location, weights_only=weights_only)
            if isinstance(checkpoint, dict):
                for key in checkpoint.keys() - _COPIED_OUT:
                    checkpoint[key] = owned_below(checkpoint[key])
            return checkpoint
        except pickle.UnpicklingError as error:
            if not zipfile.is_zipfile(path):
                raise _damaged(path, error) from error
            raise _foreign(path, error) from error
        except FileNotFoundError:
            raise
        except (RuntimeError, EOFError, KeyError, ValueError, OSError, AttributeError, IndexError) as error:
            raise _damaged(path, error) from error

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the file or folder at `path`; a folder that is half deleted never bears its name."""
        if is_local(path):
            remove(Path(path))
        else:
            super().remove_checkpoint(path)


def load_folder(path: str | Path, *, weights_only: bool | None, **arguments: Any) -> dict[str, Any]:
    """Return the distributed checkpoint in the folder `path`.

    Args:
        path: The folder.
        weights_only: As of `torch.load`.
        **arguments: Those of `files.sharded_folder.read_folder`.

    Raises:
        CheckpointError: If the folder is incomplete or damaged, or holds objects that torch only loads from a trusted source.
    """
    from lightning_unified.files.sharded_folder import ShardedFolderError, read_folder

    try:
        return read_folder(path, weights_only=weights_only, **arguments)
    except pickle.UnpicklingError as error:
        raise _foreign(path, error) from error
    except ShardedFolderError as error:
        raise CheckpointError(
            f"{path} is not a whole distributed checkpoint: {error}. Give a folder that the ranks finished, or a file; {_beside(path)}."
        ) from error


def is_local(path: str | Path) -> bool:
    """Return whether `path` is on a file system, and not at an address such as `s3://…`."""
    return _is_local_file_protocol(path)


def wait_for_writers(io: CheckpointIO | None) -> None:
    """Wait until `io` has finished writing: `AsyncCheckpointIO` writes in a thread.

    Raises:
        BaseException: The error of the thread, if it failed.
    """
    for one in _chain(io):
        if isinstance(one, AsyncCheckpointIO):
            one.teardown()  # waits for the thread; the next checkpoint starts another


def saves_in_thread(io: CheckpointIO | None) -> bool:
    """Return whether `io` copies each checkpoint on its device and writes it in a thread."""
    return any(isinstance(one, AsyncCheckpointIO) for one in _chain(io))


def _chain(io: CheckpointIO | None) -> Iterator[CheckpointIO]:
    """Yield `io` and the plugins it wraps, from outside."""
    while io is not None:
        yield io
        io = io.checkpoint_io if isinstance(io, _WrappingCheckpointIO) else None


@contextmanager
def failures_named(target: Path) -> Iterator[None]:
    """Turn errors while `target` is written into a `CheckpointError` with a remedy."""
    try:
        yield
    except Exception as error:
        cause = _system_error(error)
        if cause is not None and cause.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            advice = f"{format_bytes(_free_bytes(target))} are free there: make room, or choose another folder"
        elif cause is not None:
            advice = "check that the folder can be written, or choose another"
        else:
            advice = "an object in the checkpoint cannot be saved; the text before names it"
        kept = "the earlier file of that name is untouched" if target.exists() else "no partial file was left"
        raise CheckpointError(
            f"could not write the checkpoint {target}: {cause or f'{type(error).__name__}: {error}'}; {kept}. {advice}."
        ) from error


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error behind `error`; None if there is none.

    Torch's zip writer reports a full disk as a failure of one of its own checks.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _damaged(path: str | Path, error: Exception) -> CheckpointError:
    first_line = (str(error).splitlines() or [""])[0][:160]
    return CheckpointError(
        f"{path} is not a whole checkpoint ({type(error).__name__}: {first_line}). Give another one; {_beside(path)}."
    )


def _foreign(path: str | Path, error: Exception) -> CheckpointError:
    foreign = re.search(r"GLOBAL (\S+)", str(error))
    return CheckpointError(
        f"{path} holds {foreign.group(1) if foreign else 'objects'} beside tensors and plain values, and torch loads "
        "such things only from a trusted source. If you trust the file, pass weights_only=False to fit or validate."
    )


def _beside(path: str | Path) -> str:
    others = sorted(p.name for p in Path(path).parent.glob("*.ckpt") if p.name != Path(path).name)
    return f"beside it are {', '.join(others[-5:])}" if others else "no other checkpoint is beside it"


def _free_bytes(target: Path) -> int | None:
    try:
        return shutil.disk_usage(target.parent).free
    except OSError:
        return None
