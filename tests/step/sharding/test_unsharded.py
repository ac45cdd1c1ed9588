"""A sharded module is copied as it was before it was sharded, and stays as it is."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_unified.planner.ranks.fake_group import fake_group
from lightning_unified.step.sharding.iteration import initialize
from lightning_unified.step.sharding.unsharded import seen_unsharded
from lightning_unified.step.sharding.wrapping import is_sharded, shard, sharded_roots
from tests.support.ranks.sharded import Block, Deep


def counted(module, inputs):
    module.calls = getattr(module, "calls", 0) + 1


@pytest.fixture
def deep():
    """Return a module that is sharded and has hooks of FSDP2 and of its own."""
    with fake_group(2):
        module = Deep()
        module.blocks[0].register_forward_pre_hook(counted)
        shard(module, init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",)))
        initialize(sharded_roots(module))
        module._device_mesh = init_device_mesh("cpu", (2,))
        yield module


def attributes(module):
    return {
        name: (type(child), {key: id(value) for key, value in (vars(child) | child._parameters).items()})
        for name, child in module.named_modules()
    }


def test_a_copy_of_a_sharded_module_is_whole_and_of_its_own_class(deep):
    with seen_unsharded(deep):
        copied = copy.deepcopy(deep)

    assert not is_sharded(copied) and (type(copied), type(copied.blocks[0])) == (Deep, Block)
    assert {name: one.shape for name, one in copied.named_parameters()} == {
        name: one.shape for name, one in Deep().named_parameters()
    }
    assert all(one.is_meta and not isinstance(one, DTensor) for one in copied.parameters())
    assert copied.head.weight is copied.embed.weight
    assert copied._device_mesh is None


def test_a_copy_of_a_sharded_module_keeps_only_the_users_hooks(deep):
    with seen_unsharded(deep):
        copied = copy.deepcopy(deep)

    hooks = [
        (name, hook)
        for name, child in copied.named_modules()
        for kind, held in vars(child).items()
        if kind.endswith("_hooks") and held
        for hook in held.values()
    ]
    assert hooks == [("blocks.0", counted)]


@pytest.mark.parametrize("raises", [False, True])
def test_a_sharded_module_is_as_before_after_the_view(deep, raises):
    before = attributes(deep)
    try:
        with seen_unsharded(deep):
            assert not any(isinstance(child, FSDPModule) for child in deep.modules())
            if raises:
                raise KeyError
    except KeyError:
        pass

    assert attributes(deep) == before
    assert all(isinstance(one, DTensor) for one in deep.parameters())


def test_frozen_and_typed_parameters_are_seen_so(deep):
    deep.norm.weight.requires_grad_(False)
    deep.norm.weight.is_special = True

    with seen_unsharded(deep):
        assert not deep.norm.weight.requires_grad and deep.norm.bias.requires_grad
        assert deep.norm.weight.dtype is torch.float32
        assert deep.norm.weight.is_special
