"""Folders of distributed checkpoints: tensors in pieces, everything else in `meta.pt`.

| file | content |
|---|---|
| `__<rank>_0.distcp` | pieces of tensors, as `torch.distributed.checkpoint` writes them |
| `.metadata` | where each piece lies |
| `meta.pt` | the checkpoint of Lightning without its tensors, and the place of each tensor in it |

Tensors and plain data only: `.metadata` is a pickle of torch, and is read here with nothing but torch's own records allowed.
"""

import io
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from lightning_unified.files.mapped import load_mapped, owned_below

__all__ = ["META", "Divided", "ShardedFolderError", "check_pieces", "divided", "read_folder", "read_meta"]

META = "meta.pt"
_METADATA = ".metadata"
_PLACES = "lightning_unified.tensors"
_WITH_TENSORS = ("state_dict", "optimizer_states")  # their plain tensors are pieces too

Place = tuple[Any, ...]
"""The keys that lead to a tensor in a checkpoint."""


class ShardedFolderError(RuntimeError):
    """A folder that is not a whole distributed checkpoint, or holds more than plain data."""


class Divided:
    """A checkpoint in two parts.

    Attributes:
        tensors: The tensors by their names in the folder.
        rest: The checkpoint without them, for `meta.pt`.
    """

    def __init__(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        self.tensors, self.rest = tensors, rest


def divided(checkpoint: Mapping[str, Any], *, is_piece: Callable[[Tensor], bool]) -> Divided:
    """Return the tensors of `checkpoint`, and the rest of it.

    Tensors of weights and optimizer states are taken out, and everywhere those for which `is_piece` is true. A tensor with several names
    is one tensor.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    places: list[tuple[Place, str]] = []

    def without(value: Any, place: Place, *, takes_all: bool) -> Any:
        if isinstance(value, Tensor) and (takes_all or is_piece(value)):
            if id(value) not in names:
                names[id(value)] = _free_name(".".join(map(str, place)), tensors)
                tensors[names[id(value)]] = value
            places.append((place, names[id(value)]))
            return None
        if isinstance(value, dict) and type(value) in (dict, OrderedDict):
            return {key: without(entry, (*place, key), takes_all=takes_all) for key, entry in value.items()}
        if type(value) is list:
            return [without(entry, (*place, index), takes_all=takes_all) for index, entry in enumerate(value)]
        return value

    rest = {key: without(value, (key,), takes_all=key in _WITH_TENSORS) for key, value in checkpoint.items()}
    return Divided(tensors, {**rest, _PLACES: places})


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}#{number}", number + 1
    return free


def read_meta(path: str | Path, *, weights_only: bool | None = True) -> dict[str, Any]:
    """Return what a distributed checkpoint holds beside its tensors.

    Raises:
        ShardedFolderError: If the folder is not a whole distributed checkpoint.
        pickle.UnpicklingError: If `meta.pt` holds more than plain data, and `weights_only` is not False.
    """
    rest, _ = _rest_and_places(Path(path), weights_only=weights_only)
    return rest


def read_folder(
    path: str | Path,
    *,
    weights_only: bool | None = True,
    target_of: Callable[[Place, torch.Size, torch.dtype], Tensor | None] | None = None,
    with_optimizers: bool = True,
) -> dict[str, Any]:
    """Return the checkpoint in a folder.

    Each process reads by itself, and needs no process group.

    Args:
        path: The folder.
        weights_only: As of `torch.load`, for `meta.pt`. Tensors are always read as plain data.
        target_of: Called with the place, shape and type of a tensor; returns the tensor to read it into, such as a DTensor of which only
            the rows of this rank are read. None stands for whole tensors on the host.
        with_optimizers: Whether the states of optimizers are read.

    Raises:
        ShardedFolderError: If the folder is not a whole distributed checkpoint.
        pickle.UnpicklingError: If `meta.pt` holds more than plain data, and `weights_only` is not False.
    """
    path = Path(path)
    rest, places = _rest_and_places(path, weights_only=weights_only)
    metadata = _metadata(path)
    _check_pieces(path, metadata)
    if not with_optimizers:
        rest.pop("optimizer_states", None)
        places = [(place, name) for place, name in places if place[0] != "optimizer_states"]
    tensors: dict[str, Tensor] = {}
    for place, name in places:
        if name not in tensors:
            known = metadata.state_dict_metadata.get(name)
            if not isinstance(known, TensorStorageMetadata):
                raise ShardedFolderError(f"its pieces lack the tensor {name}")
            shape, dtype = known.size, known.properties.dtype
            target = None if target_of is None else target_of(place, shape, dtype)
            tensors[name] = torch.empty(shape, dtype=dtype) if target is None else target
    _read_into(path, dict(tensors))
    for place, name in places:
        _put(rest, place, tensors[name])
    return rest


def check_pieces(path: str | Path) -> None:
    """Raise `ShardedFolderError` unless the folder holds all pieces of its tensors."""
    path = Path(path)
    _check_pieces(path, _metadata(path))


def _rest_and_places(path: Path, *, weights_only: bool | None) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    for name in (META, _METADATA):
        if not (path / name).is_file():
            raise ShardedFolderError(f"it has no {name}")
    if not zipfile.is_zipfile(path / META):
        raise ShardedFolderError(f"{META} is damaged")
    try:
        rest = owned_below(load_mapped(path / META, weights_only=weights_only))
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, AttributeError, IndexError) as error:
        raise ShardedFolderError(f"{META} is damaged ({type(error).__name__})") from error
    if not isinstance(rest, dict) or _PLACES not in rest:
        raise ShardedFolderError(f"{META} was written by another program")
    return rest, rest.pop(_PLACES)


def _metadata(path: Path) -> Metadata:
    try:
        return _Reader(path).read_metadata()
    except pickle.UnpicklingError as error:
        raise ShardedFolderError(f"{_METADATA} is damaged, or holds more than torch's records ({error})") from error
    except Exception as error:  # damaged pickles raise almost any class, OverflowError and MemoryError among them
        raise ShardedFolderError(f"{_METADATA} is damaged ({type(error).__name__})") from error


def _check_pieces(path: Path, metadata: Metadata) -> None:
    """Raise `ShardedFolderError` unless each file has all of its pieces."""
    ends: dict[str, int] = {}
    for piece in (metadata.storage_data or {}).values():
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if Path(name).name != name or not file.is_file():
            raise ShardedFolderError(f"it has no {name}")
        if file.stat().st_size < end:
            raise ShardedFolderError(f"{name} has {file.stat().st_size:,} bytes of {end:,}")


def _read_into(path: Path, tensors: dict[str, Any]) -> None:
    if not tensors:
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # of reading without a process group
            load(tensors, storage_reader=_Reader(path), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise ShardedFolderError(_first_line(cause)) from error
    except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError, AssertionError) as error:
        raise ShardedFolderError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def _put(rest: Any, place: Iterable[Any], value: Tensor) -> None:
    *parents, last = place
    for key in parents:
        rest = rest[key]
    rest[last] = value


class _Reader(FileSystemReader):
    """Torch's reader, which unpickles only torch's own records from `.metadata`."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _Records(io.BytesIO((Path(self.checkpoint_id) / _METADATA).read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__}")
        return metadata


class _Records(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = (("torch", "Size"), ("torch.serialization", "_get_layout"))

    @override
    def find_class(self, module: str, name: str) -> Any:
        found = None
        if module in self._MODULES and "." not in name:
            found = super().find_class(module, name)
            if not isinstance(found, type) or found.__module__ != module:
                found = None
        elif (module, name) in self._NAMES:
            found = super().find_class(module, name)
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        elif module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            found = Path if name in ("PosixPath", "WindowsPath") else None  # of the folder, as it was written
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found
