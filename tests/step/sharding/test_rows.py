"""Each rank holds as many rows as torch divides, and whole tensors come back from them."""

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_unified.errors import ConfigurationError
from lightning_unified.step.ranks.consensus import Ranks
from lightning_unified.step.sharding.rows import gathered, rows_of, sharded_like
from tests.support.ranks.processes import on_ranks


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 11])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_are_divided_as_torch_divides(rows, ranks):
    parts = torch.arange(rows).chunk(ranks)
    parts = [*parts, *[torch.empty(0)] * (ranks - len(parts))]

    found = [rows_of(rows, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [end - begin for begin, end in found] == [len(part) for part in parts]


def there_and_back():
    torch.distributed.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    mesh, ranks = init_device_mesh("cpu", (2,)), Ranks(timeout=None)
    pairs = []
    for shape in ((1,), (5, 3), (6, 2)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        like = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
        shard = sharded_like(whole, like, ranks)
        assert isinstance(shard, DTensor)
        pairs.append((gathered(shard, ranks, wanted=ranks.rank == 0), whole))
    columns = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])
    with pytest.raises(ConfigurationError, match=r"placements .*Shard\(dim=1\)"):
        gathered(columns, ranks, wanted=True)
    same = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    return pairs, gathered(same, ranks, wanted=True)


def test_a_whole_tensor_is_that_of_all_ranks_rows():
    (first, ones), (second, _) = on_ranks(there_and_back)

    assert all(torch.equal(*pair) for pair in first)
    assert all(found is None for found, _ in second)
    assert torch.equal(ones, torch.ones(2))
