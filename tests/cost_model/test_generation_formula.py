"""The generation formula equals the bytes of real tensors."""

import pytest
import torch
from torch.profiler import profile

from lightning_unified.cost_model.generation import NetworkShape, generation_bytes
from lightning_unified.models.gearhead.kv_cache import KVCache


def shape(*, item_bytes=2, vocabulary=100, **figures):
    return NetworkShape(layers=3, kv_heads=2, head_width=16, vocabulary=vocabulary, item_bytes=item_bytes, **figures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_taken_once_has_the_bytes_of_the_formula(dtype):
    cache = KVCache(layers=3, batch=4, heads=2, length=40, head_width=16, dtype=dtype)

    assert shape(item_bytes=dtype.itemsize).cache_bytes(batch=4, length=40) == cache._store.nbytes


def dynamic_cache():
    return pytest.importorskip("transformers.cache_utils").DynamicCache()


def token(tokens=1):
    return torch.zeros(4, 2, tokens, 16)


def test_the_growing_cache_of_transformers_holds_the_bytes_of_the_formula():
    cache = dynamic_cache()
    for tokens in (30, *[1] * 10):
        for layer in range(3):
            cache.update(token(tokens), token(tokens), layer)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    assert shape(item_bytes=4).cache_bytes(batch=4, length=40) == held


def test_the_growing_cache_of_transformers_peaks_where_the_formula_says():
    cache = dynamic_cache()
    prompt = token(39)
    with profile(profile_memory=True) as profiled:
        for layer in range(3):
            cache.update(prompt, prompt, layer)
        for layer in range(3):
            cache.update(token(), token(), layer)
    changes = [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = [sum(changes[: index + 1]) for index in range(len(changes))]
    new = 2 * token().nbytes
    formula = shape(item_bytes=4, grows=True).cache_bytes(batch=4, length=40)

    assert abs(max(live) - formula) <= new


def test_generation_adds_weights_and_the_wider_of_prompt_and_logits():
    found = generation_bytes(shape(weights_bytes=6000), batch=4, prompt=30, new=10)

    assert found.cache == shape().cache_bytes(batch=4, length=40)
    assert found.logits == 4 * 100 * (2 + 2 * 4)
    assert found.peak_bytes == 6000 + found.cache + found.logits
    assert found.to_dict()["peak_bytes"] == found.peak_bytes


def test_a_wide_pass_over_the_prompt_can_be_the_peak():
    found = generation_bytes(shape(vocabulary=10, widest=500), batch=4, prompt=30, new=10)

    assert found.peak_bytes == found.cache + 4 * 30 * 500 * 2


def test_logits_of_every_position_of_the_prompt_are_counted_where_they_are_computed():
    wide = generation_bytes(shape(all_logits=True), batch=4, prompt=30, new=0)
    of_sampling = 2 * torch.zeros(4, 100).nbytes

    assert wide.logits == torch.zeros(4, 30, 100, dtype=torch.bfloat16).nbytes + of_sampling


def test_a_shape_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="vocabulary=0, widest=-1: give positive numbers"):
        shape(vocabulary=0, widest=-1)
    with pytest.raises(ValueError, match="prompt=0, new=-1: give positive numbers"):
        generation_bytes(shape(), batch=4, prompt=0, new=-1)
