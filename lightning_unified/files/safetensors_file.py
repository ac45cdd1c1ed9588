"""Read tensors of a safetensors file straight into their own memory, without a mapping.

Format: 8 bytes with the header's length, the header in JSON (dtype, shape and place of each tensor), then the tensors' bytes, all little
endian. Source: the README of safetensors/safetensors. Its own reader maps the file, and mapped pages cannot leave the cache
(safetensors issues 728 and 758).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_unified.files.pages import PIECE, drop

__all__ = ["StoredTensor", "read_header", "read_tensor"]

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_LENGTH = 8  # bytes of the header's length
_LONGEST_HEADER = 100_000_000  # as in safetensors itself


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Place of a tensor in a file.

    Attributes:
        dtype: Dtype in the file.
        shape: Its sizes.
        offset: First byte in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, in the order of their bytes.

    Raises:
        ValueError: If it is no whole safetensors file, or holds a dtype that is not known.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        if size < _LENGTH or length > min(size - _LENGTH, _LONGEST_HEADER):
            raise _damaged(file, f"a header of {length:,} bytes in a file of {size:,}")
        text = opened.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        begin = _LENGTH + length
        found = {name: _stored(entry, begin=begin, size=size) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}") from error
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


def read_tensor(descriptor: int, stored: StoredTensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Read one tensor into host memory; beside it, only `PIECE` bytes are in memory at any time.

    Args:
        descriptor: The open file, see `pages.opened_uncached`.
        stored: The tensor's place.
        dtype: Dtype of the result; default that of the file.

    Raises:
        OSError: If the file ends early.
    """
    target = torch.empty(stored.shape, dtype=dtype or stored.dtype)
    flat, width = target.view(-1), stored.dtype.itemsize
    step = max(1, PIECE // width)
    is_direct = target.dtype == stored.dtype
    held = flat if is_direct else torch.empty(min(step, flat.numel()), dtype=stored.dtype)
    for begin in range(0, flat.numel(), step):
        end = min(begin + step, flat.numel())
        piece = flat[begin:end] if is_direct else held[: end - begin]
        offset = stored.offset + begin * width
        _fill(descriptor, piece, offset)
        drop(descriptor, offset + piece.nbytes)
        if not is_direct:
            flat[begin:end].copy_(piece)
    return target


def _stored(entry: Mapping[str, Any], *, begin: int, size: int) -> StoredTensor:
    first, last = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']}, which is none of {', '.join(_DTYPES)}")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(int(length) for length in entry["shape"])
    count = dtype.itemsize
    for length in shape:
        count *= length
    if min((0, first, *shape)) < 0 or last - first != count or begin + last > size:
        raise ValueError(f"a tensor of {count:,} bytes at {first:,} to {last:,}")
    return StoredTensor(dtype=dtype, shape=shape, offset=begin + first)


def _fill(descriptor: int, piece: Tensor, offset: int) -> None:
    """Read a contiguous tensor on the CPU from `offset`."""
    room = piece.view(torch.uint8).numpy().data
    while room:
        os.lseek(descriptor, offset, os.SEEK_SET)
        got = os.readv(descriptor, [room]) if hasattr(os, "readv") else _read(descriptor, room)
        if not got:
            raise OSError(f"a file of weights ended {len(room):,} bytes early; it was changed while it was read.")
        offset, room = offset + got, room[got:]


def _read(descriptor: int, room: memoryview) -> int:
    """Read where the system has no `readv` (Windows)."""
    data = os.read(descriptor, len(room))
    room[: len(data)] = data
    return len(data)


def _damaged(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} cannot be read as a safetensors file: {why}. Download or save it again.")
