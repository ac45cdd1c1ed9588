"""Count and slice the rows of tensors, arrays, PyG graphs, TensorDicts and nested tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_unified.errors import SplitError
from lightning_unified.step.split.containers import is_tensor_collection, tensors_in, with_class_of

__all__ = ["ARRAY_LIKE", "TENSOR", "TENSOR_COLLECTION", "Kind", "kind_of"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of batch entry, with functions to count and slice its rows.

    Attributes:
        rows: Returns the number of rows of an entry; None for an entry without a row dimension.
        split: `split(entry, start, stop)` returns rows `start` to `stop` as an entry of the same kind.
        elements: Returns the number of values in an entry.
        refusal: Returns the reason why an entry cannot be split; None if it can.
    """

    rows: Callable[[Any], int | None]
    split: Callable[[Any, int, int], Any]
    elements: Callable[[Any], int]
    refusal: Callable[[Any], str | None] = lambda _value: None


def kind_of(value: Any) -> Kind | None:
    """Return the kind of `value`; None without one.

    Containers, plain values and objects of unknown classes have no kind. An object of an unknown class that converts to an array, such as an
    index of pandas, has a number of rows.
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            return _NESTED
        return TENSOR if value.layout == torch.strided else _SPARSE
    if isinstance(value, PackedSequence):
        return _PACKED
    if isinstance(value, np.ndarray):
        return _ARRAY
    if is_tensor_collection(value):
        return TENSOR_COLLECTION if len(value.batch_size) else None
    if not isinstance(value, Mapping) and isinstance(getattr(value, "num_graphs", None), int):
        return _GRAPHS
    shape = getattr(value, "shape", None) if hasattr(type(value), "__array__") else None
    return ARRAY_LIKE if isinstance(shape, tuple) and shape else None


def _first_dimension(value: Any) -> int | None:
    return value.size(0) if value.dim() else None


def _split_tensor(value: Tensor, start: int, stop: int) -> Tensor:
    return with_class_of(value, value[start:stop])


def _split_nested(value: Tensor, start: int, stop: int) -> Tensor:
    return torch.nested.as_nested_tensor(list(value.unbind()[start:stop]), layout=value.layout)


def _split_sparse(value: Tensor, start: int, stop: int) -> Tensor:
    return value.index_select(0, torch.arange(start, stop, device=value.device))


def _refusal_of_sparse(value: Tensor) -> str | None:
    if value.layout == torch.sparse_coo:
        return None
    return f"a tensor of layout {value.layout} cannot be split by rows (a dense or a COO tensor can)"


def _split_packed(value: PackedSequence, start: int, stop: int) -> PackedSequence:
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    in_order = value.sorted_indices is None
    return pack_padded_sequence(padded[start:stop], lengths[start:stop], batch_first=True, enforce_sorted=in_order)


def _refusal_of_graphs(value: Any) -> str | None:
    if hasattr(value, "to_data_list") and hasattr(type(value), "from_data_list"):
        return None
    return (
        f"a batch of type {type(value).__name__} counts its rows (num_graphs={value.num_graphs}) and offers no way to split them "
        "(to_data_list and from_data_list)"
    )


def _split_graphs(value: Any, start: int, stop: int) -> Any:
    """Split a batch of graphs with torch_geometric's `to_data_list` and `from_data_list`."""
    part = type(value).from_data_list(value.to_data_list()[start:stop])
    lost = sorted({str(key) for key in _keys(value)} - {str(key) for key in _keys(part)})
    if lost:
        raise SplitError(
            f"splitting a batch of type {type(value).__name__} loses its entries {', '.join(lost)}; give "
            "rows=RowRules(split=…) in MicroBatchRules, or splittable=False to run batches whole."
        )
    return part


def _keys(value: Any) -> Any:
    keys = getattr(value, "keys", ())
    return keys() if callable(keys) else keys


TENSOR = Kind(_first_dimension, _split_tensor, Tensor.numel)
TENSOR_COLLECTION = Kind(
    lambda value: value.batch_size[0],
    lambda value, start, stop: value[start:stop],
    lambda value: sum(tensor.numel() for tensor in tensors_in(value)),
)
_NESTED = Kind(_first_dimension, _split_nested, Tensor.numel)
_SPARSE = Kind(_first_dimension, _split_sparse, Tensor.numel, _refusal_of_sparse)
_ARRAY = Kind(
    lambda value: value.shape[0] if value.ndim else None,
    lambda value, start, stop: value[start:stop],
    lambda value: int(value.size),
)
ARRAY_LIKE = Kind(  # may be shared: rows of it are not looked at, so they are not split
    lambda value: value.shape[0], lambda value, start, stop: value[start:stop], lambda value: math.prod(value.shape)
)
_PACKED = Kind(lambda value: int(value.batch_sizes[0]), _split_packed, lambda value: value.data.numel())
_GRAPHS = Kind(lambda value: value.num_graphs, _split_graphs, lambda _value: 0, _refusal_of_graphs)
