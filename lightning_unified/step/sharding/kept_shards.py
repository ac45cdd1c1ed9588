"""A sharded module whose blocks are gathered one at a time, after a vote of all ranks."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_unified.errors import RankError
from lightning_unified.step.ranks.consensus import Outcome, Ranks, Word
from lightning_unified.step.ranks.reduction import Replicas
from lightning_unified.step.sharding.iteration import VotedCollectives, reset_iteration, set_collectives

__all__ = ["KeptShards", "refuse_other_collectives"]


class KeptShards(Replicas):
    """A sharded module whose blocks are gathered one at a time.

    FSDP2 has reduced the gradients when the passes end.

    Attributes:
        collectives: The collectives of all blocks, which vote during a step.
    """

    strategy = "unified_fsdp"

    def __init__(self, module: nn.Module, roots: Sequence[FSDPModule], ranks: Ranks) -> None:
        super().__init__(module, ranks)
        self._roots = list(roots)
        self.collectives = VotedCollectives(ranks)
        set_collectives(self._roots, self.collectives)

    def leave(self, *, failed: bool) -> None:
        """Free gathered parameters after the passes of a batch.

        After passes that `failed`, reset FSDP2's state as well.
        """
        self.collectives.vote = None
        if failed:
            reset_iteration(self._roots, reshards=True)
        self.free()

    def free(self) -> None:
        """Free gathered parameters: a forward pass without gradients leaves those of the root."""
        for root in self._roots:
            root.reshard()

    @override
    def absent(self) -> int:
        return 0

    @override
    def fill(self, absent: int) -> None:
        """Do nothing: FSDP2 reduces the same parameters on all ranks."""

    @override
    def average_gradients(self, absent: int) -> None:
        """Do nothing: FSDP2 has averaged the gradients."""


def refuse_other_collectives(words: Sequence[Word]) -> None:
    """Raise `RankError` if ranks are about to run different collectives."""
    if len({word.digest for word in words if word.outcome is Outcome.WELL}) > 1:
        raise RankError(
            "the ranks came to different collectives of the sharded module, because their steps take different paths (a layer or a loss "
            "that only some ranks have in this batch), or because one of them failed, which its own output says. Let every rank run the same "
            'layers, or give hold="parameters".'
        )
