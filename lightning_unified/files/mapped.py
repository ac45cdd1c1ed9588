"""Checkpoints mapped by `torch.load`, and copies out of them that give their pages back.

`torch.load(mmap=True)` returns tensors that are views of the file's pages. Values then move to parameters and to the optimizer's state.
Inside `giving_back`, a copy out of such a tensor runs piece by piece and drops each piece's pages, so that values and pages are never
both in memory. A view that stays would keep the pages, and read another file's bytes if the file is written in place: `owned` copies it.
"""

import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_unified.files.pages import PIECE, give_back_mapped

__all__ = ["giving_back", "is_mapped", "load_mapped", "owned", "owned_below"]

_MAPPED: "WeakSet[torch.UntypedStorage]" = WeakSet()  # storages of loaded checkpoints


def load_mapped(path: str | Path, *, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
    """Return the checkpoint in a local file, with its tensors mapped instead of read.

    Files of torch before 1.6 cannot be mapped, and are read. The arguments and errors are those of `torch.load`.
    """
    if not zipfile.is_zipfile(path):
        return torch.load(path, map_location=map_location, weights_only=weights_only)
    checkpoint = torch.load(path, map_location=map_location, weights_only=weights_only, mmap=True)
    for tensor in _tensors(checkpoint):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            _MAPPED.add(tensor.untyped_storage())
    return checkpoint


def is_mapped(value: Any) -> bool:
    """Return whether a value is a tensor in the pages of a loaded checkpoint."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.untyped_storage() in _MAPPED


def owned(tensor: Tensor) -> Tensor:
    """Copy a mapped tensor into its own memory and release its pages; return others unchanged."""
    return _moved(tensor, dtype=tensor.dtype, device=tensor.device) if is_mapped(tensor) else tensor


def owned_below(value: Any) -> Any:
    """Replace mapped tensors in dicts, lists and tuples by `owned` ones.

    Dicts and lists change in place.
    """
    if isinstance(value, Tensor):
        return owned(value)
    if type(value) is tuple:
        return tuple(owned_below(entry) for entry in value)
    places: Iterable[Any] = ()
    if isinstance(value, dict):
        places = list(value)
    elif isinstance(value, list):
        places = range(len(value))
    for place in places:
        new = owned_below(value[place])
        if new is not value[place]:
            value[place] = new
    return value


@contextmanager
def giving_back() -> Iterator[None]:
    """Copy out of mapped tensors piece by piece inside the context, and give their pages back.

    `Tensor.copy_`, `Tensor.to` and `Tensor.clone` do so; `to` of a mapped tensor always returns other memory than the file's.
    """
    with _GivingBack():
        yield


class _GivingBack(TorchFunctionMode):
    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and len(args) > 1 and is_mapped(args[1]) and _is_plain(args[0]):
            return _copy(args[0], args[1])
        if func is Tensor.to and is_mapped(args[0]) and "memory_format" not in kwargs:
            like = args[0].new_empty(0).to(*args[1:], **kwargs)
            return _moved(args[0], dtype=like.dtype, device=like.device)
        if func is Tensor.clone and is_mapped(args[0]) and not kwargs:
            return owned(args[0])
        return func(*args, **kwargs)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def _moved(tensor: Tensor, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.no_grad():
        return _copy(torch.empty_like(tensor, dtype=dtype, device=device), tensor)


def _copy(target: Tensor, mapped: Tensor) -> Tensor:
    """Copy a mapped tensor into `target` and return it."""
    if not (target.is_contiguous() and mapped.is_contiguous() and target.shape == mapped.shape):
        target.copy_(mapped)  # broadcast or strided: whole
        _give_back(mapped)
        return target
    into, out_of = target.view(-1), mapped.view(-1)
    step = max(1, PIECE // mapped.element_size())
    for begin in range(0, mapped.numel(), step):
        piece = out_of[begin : begin + step]
        into[begin : begin + step].copy_(piece)
        _give_back(piece)
    return target


def _give_back(piece: Tensor) -> None:
    give_back_mapped(piece.data_ptr(), piece.nbytes if piece.is_contiguous() else piece.untyped_storage().nbytes())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
