"""Keys and values of the tokens already read, so that the next token costs one token's work."""

import torch
from torch import Tensor

__all__ = ["KVCache"]


class KVCache:
    """Room for the keys and values of every layer, taken once and filled from the left.

    Taken once because a cache that grows by concatenation copies itself for every token and leaves the old copy to
    the allocator.

    Shapes:
        Keys and values of one layer (B, H, T, K): batch, heads, tokens, width of a head.

    Args:
        layers: Number of layers.
        batch: B.
        heads: H.
        length: The most tokens it holds.
        head_width: K.
        device: Where it lives.
        dtype: What it holds.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        heads: int,
        length: int,
        head_width: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (layers, 2, batch, heads, length, head_width)
        self._store = torch.zeros(shape, device=device, dtype=dtype)
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens held for every layer."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens it has room for."""
        return self._store.shape[4]

    @property
    def nbytes(self) -> int:
        """Bytes taken, filled or not."""
        return self._store.nbytes

    def append(self, layer: int, *, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values of one layer and return all of that layer's, old and new.

        The length grows when `advance` is called, after the last layer has written. No gradient passes through the cache.

        Raises:
            ValueError: If the new tokens do not fit.
        """
        end = self._length + keys.shape[2]
        if end > self.capacity:
            raise ValueError(
                f"{end} tokens do not fit into a cache of {self.capacity}; make it longer or stop earlier."
            )
        stored_keys, stored_values = self._store[layer, 0], self._store[layer, 1]
        stored_keys[:, :, self._length : end] = keys.detach()
        stored_values[:, :, self._length : end] = values.detach()
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` as held; every layer has written them."""
        self._length += tokens
