"""Static cache: one allocation of keys and values, for changing numbers of rows and slots."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LayerCache", "Storage", "is_plain_cache"]


def is_plain_cache(cache: Any, *, length: int) -> bool:
    """Return whether each layer of a cache holds only every token's keys and values.

    They have the shape (P, H, length, D). Caches of sliding windows, recurrent states and quantised values do not.
    """
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    return all(layer.keys is not None and layer.keys.ndim == 4 and layer.keys.shape[2] == length for layer in layers)


class LayerCache:
    """One layer's keys and values (N, H, L, D).

    `update` writes a new token at `slot` and returns all L slots. The class has the interface of a layer's cache, for models, and of
    a whole cache, for blocks: both call `update`.
    """

    is_compileable = True
    is_sliding = False
    is_initialized = True

    def __init__(self, *, keys: Tensor, values: Tensor, slot: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.slot = slot

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the newest token's keys and values (N, H, 1, D) and return all slots'."""
        self.keys.index_copy_(2, self.slot, keys.to(self.keys.dtype))
        self.values.index_copy_(2, self.slot, values.to(self.values.dtype))
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of slots; the mask says which are filled."""
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the number of slots and their offset."""
        return self.keys.shape[2], 0


class Storage:
    """Memory of every layer's keys and values, viewed as (N, H, L, D) for the N and L in use.

    All views share the memory. When rows are dropped or the length grows, values move within it, so that a captured graph of each
    view stays valid.

    Args:
        like: Keys and values of each layer, (any, H, any, D), with the heads, width and device to use.
        slots: Capacity in slots of all rows, N x L.
        dtype: Dtype of the products in attention.
    """

    def __init__(self, like: Sequence[tuple[Tensor, Tensor]], *, slots: int, dtype: torch.dtype) -> None:
        self.slots = slots
        self.dtype = dtype
        self._layers = [
            tuple(one.new_zeros(slots * one.shape[1] * one.shape[3], dtype=dtype) for one in layer) for layer in like
        ]
        self._sizes = [tuple((one.shape[1], one.shape[3]) for one in layer) for layer in like]

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(one.nbytes for layer in self._layers for one in layer)

    def fits(self, *, slots: int, dtype: torch.dtype) -> bool:
        """Return whether `slots` slots fit."""
        return slots <= self.slots and dtype == self.dtype

    def views(self, *, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values (rows, H, length, D) of each layer."""
        found = []
        for layer, sizes in zip(self._layers, self._sizes, strict=True):
            keys, values = (
                one[: rows * heads * length * width].view(rows, heads, length, width)
                for one, (heads, width) in zip(layer, sizes, strict=True)
            )
            found.append((keys, values))
        return found

    def fill(self, prompt: Sequence[tuple[Tensor, Tensor]], *, group: int, length: int) -> None:
        """Write the keys and values (P, H, S, D) of prompts, each for its `group` rows."""
        for layer, given in zip(self.views(rows=len(prompt[0][0]) * group, length=length), prompt, strict=True):
            for view, one in zip(layer, given, strict=True):
                view.zero_()  # a masked slot must not hold NaN either
                view.unflatten(0, (-1, group))[:, :, :, : one.shape[2]] = one[:, None]

    def move(self, *, rows: int, length: int, kept: Tensor, to_length: int) -> None:
        """Keep the rows `kept` (K) in their order, with `to_length` slots each; new slots are zero."""
        old, new = self.views(rows=rows, length=length), self.views(rows=len(kept), length=to_length)
        for before, after in zip(old, new, strict=True):
            for source, target in zip(before, after, strict=True):
                held = source.index_select(0, kept)
                target.zero_()
                target[:, :, :length] = held
