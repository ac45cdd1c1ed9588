"""A strategy of several ranks that names a lost one, in its collectives and in its launcher."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_unified.step.ranks.consensus import Ranks
from lightning_unified.strategies.launcher import watched

__all__ = ["NamedLosses"]


class NamedLosses(Strategy):
    """Turns the failure of a Trainer's collective into a `RankError` with the ranks that are gone.

    Lightning and callbacks meet in collectives outside of the step too: at checkpoints, in validations, at epochs' ends.
    """

    _ranks: Ranks | None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = watched(self._launcher)

    def _named(self) -> AbstractContextManager[None]:
        ranks = self._ranks
        return nullcontext() if ranks is None or ranks.is_over else ranks.losses_named()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._named():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self._named():
            return super().broadcast(obj, src)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with self._named():
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        with self._named():
            return super().reduce(tensor, group=group, reduce_op=reduce_op)
