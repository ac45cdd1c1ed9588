"""KV cache: keys and values of earlier tokens, so that a new token costs one token's work."""

import torch
from torch import Tensor

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of every layer, allocated once and filled from the left.

    A cache that grows by concatenation would copy itself for every token and leave the old copy to the allocator.

    Shapes:
        Keys and values of one layer (B, H, T, K): batch, heads, tokens, width of a head.

    Args:
        layers: Number of layers.
        batch: B.
        heads: H.
        length: Capacity in tokens.
        head_width: K.
        device: Device of the cache.
        dtype: Dtype of the cache.
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
        """Capacity in tokens."""
        return self._store.shape[4]

    def append(self, layer: int, *, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values of a layer; return all of the layer's.

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
