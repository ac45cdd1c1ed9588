"""The modules that are gathered together: repeated blocks alone, tied parameters with the root."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_unified.errors import ConfigurationError
from lightning_unified.step.sharding.wrapping import is_sharded, shard, sharded_roots, wrapping_of


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


class Decoder(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if tied:
            self.blocks[2][2].weight = self.blocks[1][2].weight
            self.head.weight = self.embed.weight


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


def test_each_repeated_block_is_a_group():
    assert wrapping_of(Decoder()).blocks == ("blocks.0", "blocks.1", "blocks.2")


def test_blocks_that_share_a_parameter_join_the_roots_group():
    found = wrapping_of(Decoder(tied=True))

    assert found.blocks == ("blocks.0",)
    assert "blocks.1, blocks.2 in the root's group" in found.reason


def test_a_block_that_is_used_twice_is_one_group():
    module = Decoder()
    module.blocks.append(module.blocks[0])

    assert len(wrapping_of(module).blocks) == 3


def test_a_module_without_blocks_is_one_group():
    assert wrapping_of(nn.Linear(4, 4)).blocks == ()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_become_this_ranks_rows(mesh, device):
    with torch.device(device):
        module = Decoder(tied=True)
    shard(module, mesh)

    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert module.blocks[0][0].weight.to_local().shape == (4, 8)
    assert module.head.weight is module.embed.weight
    assert [isinstance(block, FSDPModule) for block in module.blocks] == [True, False, False]
    assert is_sharded(module)
    assert sharded_roots(module) == [module]


def test_roots_are_the_outermost_sharded_modules(mesh):
    module = nn.ModuleDict({"one": Decoder(), "plain": nn.Linear(2, 2)})
    shard(module["one"], mesh)

    assert sharded_roots(module) == [module["one"]]


@pytest.mark.parametrize(
    ("parameter", "text"), [(torch.zeros(()), "has no dimension"), (torch.zeros(4, 2).T, "not contiguous")]
)
def test_a_parameter_that_cannot_be_sharded_is_refused_by_name(mesh, parameter, text):
    module = nn.Linear(4, 4)
    module.scale = nn.Parameter(parameter)

    with pytest.raises(ConfigurationError, match=f"scale, w.*{text}"):
        shard(module, mesh)


def test_a_mesh_of_two_dimensions_is_refused(mesh):
    with pytest.raises(ConfigurationError, match="hybrid sharding and tensor parallelism are not supported"):
        shard(Decoder(), init_device_mesh("cpu", (2, 2)))
