"""The tensors of a batch by path: keys, indices and field names joined by dots."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_unified.step.split.containers import entries_of, is_sequence, joined

__all__ = ["leaf_at", "named_tensors"]

_LONG = 64  # entries of a list from which on it holds rows, not fields


def named_tensors(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every leaf; nested tensors, and lists of more than 64 entries, which hold rows, are left out."""
    if isinstance(batch, Tensor):
        if not batch.is_nested:
            yield path, batch
    elif not (is_sequence(batch) and len(batch) > _LONG):
        for name, entry in entries_of(batch) or ():
            yield from named_tensors(entry, joined(path, name))


def leaf_at(batch: Any, path: str) -> Tensor | None:
    """Return the tensor at `path`; None if this batch has none there."""
    return next((tensor for name, tensor in named_tensors(batch) if name == path), None)
