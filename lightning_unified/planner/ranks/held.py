"""What a rank of `unified_fsdp` holds beside FSDP2's own buffers, in a dry run.

It is whole parameters, or scratch memory alone.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_unified.cost_model.rates.links import gathered_bytes, reduced_bytes
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.step.sharding.iteration import initialize
from lightning_unified.step.sharding.kept_shards import KeptShards
from lightning_unified.step.sharding.shards import WholeShards
from lightning_unified.step.sharding.wrapping import sharded_roots

__all__ = ["held_shards"]


def held_shards(
    module: L.LightningModule, mesh: DeviceMesh, *, whole: bool, recorder: Recorder
) -> WholeShards | KeptShards:
    """Return what a rank holds during a step; call it inside the fake world.

    Args:
        module: The copy.
        mesh: The ranks, this one among them.
        whole: Whether it holds whole parameters and gradients, or gathers one block at a time.
        recorder: Takes notes of the collectives.
    """
    roots = sharded_roots(module)
    initialize(roots)
    ranks: Any = _LoneRank(mesh, recorder)
    shards = WholeShards(module, roots, ranks) if whole else KeptShards(module, roots, ranks)
    recorder.mark([shards.scratch], "communication")
    return shards


class _LoneRank:
    """One of several ranks, without the others.

    Meetings are empty, and collectives leave a note.

    Attributes:
        rank: The number of the rank.
        size: The number of ranks.
        recorder: Takes the notes.
        are_real: False, because no collective runs.
    """

    are_real = False

    def __init__(self, mesh: DeviceMesh, recorder: Recorder) -> None:
        self.rank, self.size, self.recorder = mesh.get_local_rank(), mesh.size(), recorder

    def expect(self, *, parameters: int) -> None:
        """Expect nothing."""

    def meet(self, *_: Any, **__: Any) -> list[Any]:
        """Return the words of no other rank."""
        return []

    def losses_named(self) -> AbstractContextManager[None]:
        """Return a block in which no rank can be lost."""
        return nullcontext()

    def average(self, tensor: Tensor) -> None:
        """Note a sum over all ranks."""
        self._note("all-reduce", reduced_bytes(_bytes(tensor), ranks=self.size))

    def scatter_sum(self, tensor: Tensor, _own: Tensor) -> None:
        """Note a sum over all ranks, of which each keeps a part."""
        self._note("reduce-scatter", gathered_bytes(_bytes(tensor), ranks=self.size))

    def _note(self, name: str, sent: int) -> None:
        self.recorder.note_collective(name, sent=sent, overlaps=False)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
