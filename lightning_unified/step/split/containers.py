"""Read, rebuild and copy the containers of batches, and find the tensors inside."""

import copy
import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = [
    "PLAIN",
    "entries_of",
    "is_list_of_plain",
    "is_record",
    "is_sequence",
    "is_tensor_collection",
    "joined",
    "tensors_in",
    "with_class_of",
    "with_entries",
    "with_fields",
    "with_items",
]

PLAIN = (str, bytes, int, float, complex, type(None), torch.Size)


def joined(path: str, key: Any) -> str:
    """Return the path of entry `key` in the container at `path`.

    Dots join the names, as in `RowRules(shared=…)`.
    """
    return f"{path}.{key}" if path else str(key)


def is_sequence(value: Any) -> bool:
    """Return whether `value` is a list or a tuple without field names.

    Its entries may be rows or columns.
    """
    return (
        isinstance(value, (list, tuple))
        and not isinstance(value, (PackedSequence, torch.Size))
        and not hasattr(value, "_fields")
    )


def is_record(value: Any) -> bool:
    """Return whether `value` is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_tensor_collection(value: Any) -> bool:
    """Return whether `value` is a `TensorDict` or an instance of a `tensorclass`."""
    module = sys.modules.get("tensordict")  # a batch has no TensorDict unless the package is loaded
    # the package's own function holds for the classes too, which functions name
    return module is not None and not isinstance(value, type) and module.is_tensor_collection(value)


def is_list_of_plain(value: Any) -> bool:
    """Return whether `value` is a list or tuple of plain values, such as strings or numbers."""
    if not is_sequence(value) or not isinstance(next(iter(value), None), PLAIN):
        return False
    return all(isinstance(entry, PLAIN) for entry in value)


def entries_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the (name, entry) pairs of a container; None for any other object.

    Names are keys, field names or indices.
    """
    if isinstance(value, PackedSequence):
        return None
    if isinstance(value, Mapping) or is_tensor_collection(value):
        return list(value.items())
    if is_record(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    return list(enumerate(value)) if is_sequence(value) else None


def with_entries(like: Any, entries: list[tuple[Any, Any]]) -> Any:
    """Return a container of the kind and with the keys of `like` that holds `entries`."""
    if isinstance(like, Mapping) or is_tensor_collection(like):
        return with_items(like, dict(entries))
    values = [value for _, value in entries]
    if is_record(like):
        following = iter(values)
        return with_fields(like, lambda _: next(following))
    return like._make(values) if hasattr(like, "_make") else type(like)(values)


def with_fields(record: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass with `change` applied to every field.

    The copy skips `__init__`, which may take other arguments.
    """
    part = copy.copy(record)
    for field in dataclasses.fields(record):
        object.__setattr__(part, field.name, change(getattr(record, field.name)))
    return part


def with_items(like: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of `like` that holds `items`.

    Such kinds are dict, OrderedDict, BatchEncoding and TensorDict.
    """
    if type(like) is dict:
        return items
    if is_tensor_collection(like):
        part = like.clone(recurse=False)
        for key, value in items.items():
            part.set(key, value)
        return part
    part = copy.copy(like)
    for key, value in items.items():
        part[key] = value
    return part


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the containers of `value`, depth first.

    Containers are mappings, lists, tuples and dataclasses.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield from (part for part in value if part is not None)
    elif not is_list_of_plain(value):
        for _, entry in entries_of(value) or ():
            if isinstance(entry, Tensor):
                yield entry
            else:
                yield from tensors_in(entry)


def with_class_of(like: Any, tensor: Any) -> Any:
    """Return a plain `tensor` in the class of `like`, with its attributes, such as torchvision's `Image`.

    Slices of such tensors are plain ones. A tensor stays plain if `like` has attributes that may have rows. Any other value is returned as it is.
    """
    if (
        type(tensor) is not Tensor
        or type(like) is Tensor
        or not isinstance(like, Tensor)
        or isinstance(like, nn.Parameter)
    ):
        return tensor
    attributes = vars(like)
    if not all(isinstance(one, (*PLAIN, enum.Enum)) or _is_tuple_of_plain(one) for one in attributes.values()):
        return tensor
    made = tensor.as_subclass(type(like))
    vars(made).update(attributes)
    return made


def _is_tuple_of_plain(value: Any) -> bool:
    return isinstance(value, tuple) and is_list_of_plain(value)
