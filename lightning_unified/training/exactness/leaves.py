"""The tensors of a batch by path: keys, indices and field names joined by dots."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["leaf_at", "named_tensors"]

_LONG = 64  # entries of a list from which on it holds rows, not fields


def named_tensors(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every leaf; nested tensors, and lists of more than 64 entries, which hold rows, are left out."""
    if isinstance(batch, Tensor):
        if not batch.is_nested:
            yield path, batch
        return
    for name, entry in _entries(batch):
        yield from named_tensors(entry, f"{path}.{name}" if path else str(name))


def leaf_at(batch: Any, path: str) -> Tensor | None:
    """Return the tensor at `path`; None if this batch has none there."""
    return next((tensor for name, tensor in named_tensors(batch) if name == path), None)


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value)) if len(value) <= _LONG else []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []
