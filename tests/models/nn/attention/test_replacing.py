"""Torch's attention is replaced under every loaded name, and restored."""

import pickle
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified.nn.attention import ChunkedAttention, attends_by_itself, function


class Holder(nn.Module):
    """A module that holds the function as an attribute."""

    def __init__(self):
        super().__init__()
        self.attention = F.scaled_dot_product_attention
        self.inner = nn.Linear(1, 1)


@pytest.fixture
def user(monkeypatch):
    """Return a loaded module with the function under a name of its own, and in a registry."""
    module = ModuleType("a_users_module")
    vars(module).update(
        attend=F.scaled_dot_product_attention, REGISTRY={"sdpa": F.scaled_dot_product_attention, "n": 1}
    )
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    return module


def names(user, holder):
    return {F.scaled_dot_product_attention, user.attend, user.REGISTRY["sdpa"], holder.attention}


def test_every_loaded_name_is_replaced_and_restored(user):
    holder = nn.Sequential(Holder())
    attention = ChunkedAttention(holder)
    replaced = names(user, holder[0])
    attention.remove()
    attention.remove()

    assert len(replaced) == 1 and function.TORCHS not in replaced
    assert names(user, holder[0]) == {function.TORCHS}


def test_a_name_that_is_made_meanwhile_is_restored_too(user):
    attention = ChunkedAttention(nn.Identity())
    user.late, kept = F.scaled_dot_product_attention, F.scaled_dot_product_attention
    attention.remove()
    tensors = [torch.randn(1, 1, 3, 2, requires_grad=True) for _ in range(3)]

    assert user.late is function.TORCHS
    assert type(kept(*tensors).grad_fn).__name__ != "_InChunksBackward" and attention.calls == 0


def test_the_name_stays_replaced_until_the_last_of_two_is_removed(user):
    first, second = ChunkedAttention(nn.Identity()), ChunkedAttention(Holder())
    first.remove()
    assert F.scaled_dot_product_attention is not function.TORCHS
    second.remove()
    assert names(user, Holder()) == {function.TORCHS}


def test_a_module_that_is_pickled_meanwhile_holds_torchs_function():
    holder = Holder()
    attention = ChunkedAttention(holder)
    data = pickle.dumps(holder)
    attention.remove()

    assert pickle.loads(data).attention is function.TORCHS


def test_transformers_registry_is_replaced():
    transformers = pytest.importorskip("transformers")
    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    registry.register("ours", F.scaled_dot_product_attention)
    registry["local"] = F.scaled_dot_product_attention
    try:
        attention = ChunkedAttention(nn.Identity())
        replaced = {registry["ours"], registry["local"]}
        attention.remove()

        assert function.TORCHS not in replaced
        assert {registry["ours"], registry["local"]} == {function.TORCHS}
    finally:
        del registry._global_mapping["ours"], registry["local"]


def test_modules_that_compute_weights_themselves_are_named():
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 2, enable_nested_tensor=False)
    net = nn.ModuleDict({"layers": layers, "own": nn.MultiheadAttention(4, 2)})

    assert attends_by_itself(net) == ["own (nn.MultiheadAttention, unless need_weights=False)"]


def test_eager_models_are_named_once():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    models = {
        kind: transformers.AutoModel.from_config(transformers.BertConfig(**sizes), attn_implementation=kind)
        for kind in ("eager", "sdpa")
    }

    assert attends_by_itself(nn.ModuleDict(models)) == ['eager (attn_implementation="eager")']
