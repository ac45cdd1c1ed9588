"""The cache of keys and values."""

import pytest
import torch

from lightning_unified.models.gearhead.kv_cache import KVCache


def _cache():
    return KVCache(layers=2, batch=1, heads=3, length=5, head_width=4)


def test_what_was_written_comes_back_in_order():
    cache = _cache()
    written = torch.randn(2, 2, 1, 3, 5, 4)
    for start, end in ((0, 3), (3, 4), (4, 5)):
        for layer in range(2):
            keys, values = cache.append(
                layer, keys=written[layer, 0][:, :, start:end], values=written[layer, 1][:, :, start:end]
            )

            assert torch.equal(keys, written[layer, 0][:, :, :end])
            assert torch.equal(values, written[layer, 1][:, :, :end])
        cache.advance(end - start)
    assert cache.length == cache.capacity == 5


def test_its_bytes_are_taken_at_once():
    cache = _cache()
    assert cache._store.nbytes == 2 * 2 * 1 * 3 * 5 * 4 * 4
    assert cache.length == 0


def test_one_token_too_many_is_refused():
    cache = _cache()
    cache.advance(5)
    with pytest.raises(ValueError, match="6 tokens do not fit into a cache of 5"):
        cache.append(0, keys=torch.zeros(1, 3, 1, 4), values=torch.zeros(1, 3, 1, 4))
