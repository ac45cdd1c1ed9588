"""The generation formula equals the bytes of real tensors."""

import pytest
import torch
from torch.profiler import profile

from lightning_unified.cost_model.generation.formula import generation_bytes, kv_cache_bytes
from lightning_unified.nn.kv_cache import KVCache

SHAPE = {"layers": 3, "kv_heads": 2, "head_width": 16, "batch": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_taken_once_has_the_bytes_of_the_formula(dtype):
    cache = KVCache(layers=3, batch=4, heads=2, length=40, head_width=16, dtype=dtype)

    assert kv_cache_bytes(**SHAPE, length=40, item_bytes=dtype.itemsize) == cache.nbytes


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

    assert kv_cache_bytes(**SHAPE, length=40, item_bytes=4) == held


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
    formula = kv_cache_bytes(**SHAPE, length=40, item_bytes=4, grows=True)

    assert abs(max(live) - formula) <= new


def test_generation_adds_weights_and_the_wider_of_prompt_and_logits():
    found = generation_bytes(
        weights_bytes=6000,
        **SHAPE,
        vocabulary=100,
        prompt=30,
        new=10,
        item_bytes=2,
    )

    assert found.cache == kv_cache_bytes(**SHAPE, length=40, item_bytes=2)
    assert found.logits == 4 * 100 * (2 + 2 * 4)
    assert found.peak_bytes == 6000 + found.cache + found.logits
    assert found.to_dict()["peak_bytes"] == found.peak_bytes


def test_a_wide_pass_over_the_prompt_can_be_the_peak():
    found = generation_bytes(weights_bytes=0, **SHAPE, vocabulary=10, prompt=30, new=10, item_bytes=2, widest=500)

    assert found.peak_bytes == found.cache + 4 * 30 * 500 * 2


def test_logits_of_every_position_of_the_prompt_are_counted_where_they_are_computed():
    wide = generation_bytes(
        weights_bytes=0, **SHAPE, vocabulary=100, prompt=30, new=0, item_bytes=2, prompt_logits=30, logits_copies=0
    )

    assert wide.logits == torch.zeros(4, 30, 100, dtype=torch.bfloat16).nbytes


def test_a_shape_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="vocabulary=0, new=-1: give positive numbers"):
        generation_bytes(weights_bytes=0, **SHAPE, vocabulary=0, prompt=1, new=-1, item_bytes=2)
