"""Access to models of transformers, whose names changed between versions."""

from types import SimpleNamespace

import pytest
import torch

from lightning_unified.models.causal_lm.language_model import cache_argument, forward_last


class Output(dict):
    """The result of a model of transformers: entries are attributes too."""

    __getattr__ = dict.__getitem__


class TakesPastKeyValues(torch.nn.Module):
    """A model before transformers 5.24."""

    def forward(self, input_ids, past_key_values=None, use_cache=None, return_dict=None):
        self.given = past_key_values
        return Output(logits=input_ids[..., None].float(), past_key_values="the new cache")


class TakesCache(torch.nn.Module):
    """A model since transformers 5.24."""

    def forward(self, input_ids, cache=None, use_cache=None, return_dict=None, logits_to_keep=0):
        self.given = cache
        return Output(logits=input_ids[..., None].float()[:, -logits_to_keep:], cache="the new cache")


@pytest.mark.parametrize(("kind", "name"), [(TakesPastKeyValues, "past_key_values"), (TakesCache, "cache")])
def test_a_model_is_given_its_cache_and_returns_it(kind, name):
    lm, cache = kind(), SimpleNamespace()
    logits, found = forward_last(lm, input_ids=torch.tensor([[1, 2], [3, 4]]), cache=cache)

    assert cache_argument(lm) == name
    assert lm.given is cache and found == "the new cache"
    assert logits.tolist() == [[2.0], [4.0]]
