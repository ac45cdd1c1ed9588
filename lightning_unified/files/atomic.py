"""Files and folders that are whole or absent.

They are written beside their name, flushed to disk, then renamed.
"""

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "PARTIAL",
    "publish",
    "put_back",
    "remove",
    "remove_partial_files",
    "share",
    "written_beside",
]

PARTIAL = ".partial"

_OLD = f".old{PARTIAL}"
_IS_OLD = re.compile(rf"^\.(?P<name>.+)\.\d+{re.escape(_OLD)}$")


def share(source: Path, target: Path) -> None:
    """Give `target` the content of `source` by hard links, or by a copy where links fail.

    Do not write `source` in place afterwards: the content is shared. This module only replaces names.

    Raises:
        OSError: If neither a link nor a copy could be made; an earlier `target` is still there.
    """
    with written_beside(target) as partial:
        if source.is_dir():
            shutil.copytree(source, partial, copy_function=_link_or_copy)
        else:
            _link_or_copy(source, partial)


def publish(partial: Path, target: Path) -> None:
    """Rename the finished file or folder `partial` to `target`; replace an earlier `target`.

    A file replaces a file in one operation of the system. If one of them is a folder, Linux and macOS exchange the two names in one
    operation on most file systems. Elsewhere the earlier `target` is renamed first; `put_back` undoes that for a process that ended
    between the two renames.
    """
    if partial.is_file():
        _flush(partial, os.O_RDONLY)
    else:
        _flush_folder(partial)
    if not os.path.lexists(target) or (partial.is_file() and not _is_folder(target)):
        partial.replace(target)
    elif _exchange(partial, target):
        _flush_folder(target.parent)
        remove(partial)
    else:
        old = target.with_name(f".{target.name}.{os.getpid()}{_OLD}")
        remove(old)
        target.rename(old)
        partial.rename(target)
        _flush_folder(target.parent)
        remove(old)
    _flush_folder(target.parent)


def put_back(path: Path) -> bool:
    """Return whether `path` exists, after an earlier folder of that name has its name again.

    A process that ended while it replaced the folder may have left it under another name.
    """
    if not os.path.lexists(path) and path.parent.is_dir():
        for old in path.parent.glob(f".*{_OLD}"):
            found = _IS_OLD.match(old.name)
            if found is not None and found["name"] == path.name:
                with suppress(OSError):  # another process did it
                    old.rename(path)
                break
    return path.exists()


def remove_partial_files(folder: Path) -> None:
    """Delete what killed writers left in `folder`, and put back what they had not replaced yet.

    No other process may be writing there.
    """
    for path in folder.glob(f".*{PARTIAL}"):
        found = _IS_OLD.match(path.name)
        if found is not None:
            put_back(path.with_name(found["name"]))
        remove(path)


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Yield a path to write; rename it to `target` if the block succeeds, else delete it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
    remove(partial)
    try:
        yield partial
        publish(partial, target)
    finally:
        # renaming one hard link over another of the same file does nothing and leaves both names
        remove(partial)


def remove(path: Path) -> None:
    """Delete the file, link or folder at `path`, if there is one.

    A folder first gets a hidden name, so that no half of it is taken for a whole one.
    """
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    if not path.name.endswith(PARTIAL):
        hidden = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
        remove(hidden)
        path = path.rename(hidden)
    shutil.rmtree(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one operation.

    Return whether the system and the file system can.

    Source:
        renameat2(2) with RENAME_EXCHANGE on Linux; renamex_np(2) with RENAME_SWAP on macOS, not run there.
    """
    call = _call_of_the_system()
    return call is not None and call(os.fsencode(one), os.fsencode(other)) == 0


@cache
def _call_of_the_system() -> Any:
    at_cwd, exchange, swap = -100, 2, 2
    library = None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        at, path, flags = ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
        library.renameat2.argtypes = (at, path, at, path, flags)
        return lambda one, other: library.renameat2(at_cwd, one, at_cwd, other, exchange)
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        library.renamex_np.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint)
        return lambda one, other: library.renamex_np(one, other, swap)
    return None


def _flush_folder(path: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):  # systems without this flag cannot open a folder, and need not flush it
        _flush(path, os.O_RDONLY | os.O_DIRECTORY)


def _flush(path: Path, flags: int) -> None:
    """Wait until `path` is on the disk.

    Otherwise a power cut may leave a new name without content, or undo the rename.
    """
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
