"""A sharded module whose blocks are gathered one at a time, after a vote of all ranks."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_unified.errors import ConfigurationError, RankError, RunError
from lightning_unified.step.ranks.consensus import Outcome, Ranks, Word
from lightning_unified.step.ranks.reduction import Replicas
from lightning_unified.step.sharding.iteration import (
    VotedCollectives,
    reset_iteration,
    set_collectives,
    sharded_in,
    whole_parameters_in,
)

__all__ = ["KeptShards", "refusal_of_hook", "refusal_of_lost_write", "refuse_other_collectives"]


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
        self._versions: dict[int, int] = {}

    def leave(self, *, failed: bool) -> None:
        """Free gathered parameters after the passes of a batch.

        After passes that `failed`, reset FSDP2's state as well.
        """
        self.collectives.vote = None
        if failed:
            reset_iteration(self._roots, reshards=True)
        self.free()
        if not failed:
            self._refuse_lost_writes()

    def _refuse_lost_writes(self) -> None:
        """Raise `RunError` if a step has written whole parameters, which FSDP2 drops."""
        for name, whole in whole_parameters_in(self._roots):
            if self._versions.setdefault(id(whole), whole._version) != whole._version:
                self._versions[id(whole)] = whole._version
                raise RunError(refusal_of_lost_write(name))

    def refuse_hooks(self) -> None:
        """Raise `ConfigurationError` for hooks of gradients; FSDP2 calls those after accumulation."""
        for name, shard in self._parameters:
            if shard._backward_hooks:
                raise refusal_of_hook(name)

    def free(self) -> None:
        """Free gathered parameters.

        A forward pass without gradients leaves those of the root, and of all modules with `reshard_after_forward=False`.
        """
        for module in sharded_in(self._roots):
            module.reshard()

    @override
    def absent(self) -> int:
        return 0

    @override
    def fill(self, absent: int) -> None:
        """Do nothing: FSDP2 reduces the same parameters on all ranks."""

    @override
    def average_gradients(self, absent: int) -> None:
        """Do nothing: FSDP2 has averaged the gradients."""


def refusal_of_lost_write(name: str) -> str:
    """Return the refusal of a write to a whole parameter that no shard gets."""
    return (
        f"the step writes the parameter {name} (by clamp_, copy_, max_norm of an embedding, …), and FSDP2 drops what is written to whole "
        'parameters: do it in on_train_batch_end; or give hold="parameters", without a param_dtype of mp_policy.'
    )


def refusal_of_hook(name: str) -> ConfigurationError:
    """Return the refusal of a hook of a parameter's gradient."""
    return ConfigurationError(
        f'strategy="unified_fsdp" cannot call the hook of the gradient of {name}: parameters are shards, whose gradients come from a reduction. '
        'Read and change gradients in on_before_optimizer_step, or use another strategy. hold="shards" calls hooks after accumulation that '
        "are registered on shards."
    )


def refuse_other_collectives(words: Sequence[Word]) -> None:
    """Raise `RankError` if ranks are about to run different collectives."""
    if len({word.digest for word in words if word.outcome is Outcome.WELL}) > 1:
        raise RankError(
            "the ranks came to different collectives of the sharded module, because their steps take different paths (a layer or a loss "
            "that only some ranks have in this batch), or because one of them failed, which its own output says. Let every rank run the same "
            'layers, or give hold="parameters".'
        )
