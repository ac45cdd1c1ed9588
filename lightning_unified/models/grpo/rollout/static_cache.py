"""Room for the keys and values of all rows, taken once; rows and length in use may change without taking more."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LayerCache", "Storage", "is_plain_cache"]


def is_plain_cache(cache: Any, *, length: int) -> bool:
    """Return whether a model's own cache holds nothing but keys and values (P, H, length, D) of every token in each layer.

    Caches of sliding windows, of recurrent states and of quantised values are something else.
    """
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    return all(layer.keys is not None and layer.keys.ndim == 4 and layer.keys.shape[2] == length for layer in layers)


class LayerCache:
    """One layer's keys and values (N, H, L, D); a new token's are written at `slot` and all L are given back.

    It answers what a model asks a layer of its cache, and what a block asks a cache: both call `update`.
    """

    is_compileable = True
    is_sliding = False
    is_initialized = True

    def __init__(self, *, keys: Tensor, values: Tensor, slot: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.slot = slot

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (N, H, 1, D) of the newest token and return those of all slots."""
        self.keys.index_copy_(2, self.slot, keys.to(self.keys.dtype))
        self.values.index_copy_(2, self.slot, values.to(self.values.dtype))
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the slots there are; which of them hold something is in the mask."""
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the slots there are and where they begin."""
        return self.keys.shape[2], 0


class Storage:
    """Memory for every layer's keys and values, seen as (N, H, L, D) for the N and L that are in use.

    One view lies over another: when rows are dropped or the length grows, what is kept is moved within the same memory, so that
    a captured graph of each view stays valid.

    Args:
        like: Keys and values of each layer, (any, H, any, D): heads, width and device are taken from them.
        slots: The most slots of all rows together, N x L.
        dtype: What is kept: that of the products in attention.
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
        """Bytes taken."""
        return sum(one.nbytes for layer in self._layers for one in layer)

    def fits(self, *, slots: int, dtype: torch.dtype) -> bool:
        """Return whether `slots` slots of the same layers have room here."""
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
        """Write the keys and values (P, H, S, D) of prompts, each for the `group` rows that go on from it."""
        for layer, given in zip(self.views(rows=len(prompt[0][0]) * group, length=length), prompt, strict=True):
            for room, one in zip(layer, given, strict=True):
                room.zero_()  # a slot that is masked still must not hold NaN
                room.unflatten(0, (-1, group))[:, :, :, : one.shape[2]] = one[:, None]

    def move(self, *, rows: int, length: int, kept: Tensor, to_length: int) -> None:
        """Keep the rows `kept` (K) of the `rows` in use, in their order, and give each `to_length` slots; the new ones are zero."""
        old, new = self.views(rows=rows, length=length), self.views(rows=len(kept), length=to_length)
        for before, after in zip(old, new, strict=True):
            for source, target in zip(before, after, strict=True):
                held = source.index_select(0, kept)
                target.zero_()
                target[:, :, :length] = held
