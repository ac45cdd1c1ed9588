"""The optimizer's part of a step on sharded parameters: the global norm, and the update.

No rank can copy another's weights, because each has other rows. So nothing is written before all ranks are ready, and a rank whose
update fails restores its own copies and writes again, alone.

    gradients reduced                  every rank has its rows
    BEFORE_WEIGHTS                     did that succeed everywhere?
    hooks, clipping                    the norm of all rows is one number that all ranks sum, in memory reserved before
    UPDATE                             has every rank clipped? if not, all undo and repeat the batch; nothing is written yet
    the optimizer's update             each rank for itself; one that runs out of memory restores its copies and tries again
    AFTER_WEIGHTS                      if a rank could not write, all end
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import HalfUpdatedError, OutOfMemoryError, RankError
from lightning_unified.step.ranks.consensus import Outcome, Point
from lightning_unified.step.ranks.loop import DistributedOptimization
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.recovery.snapshot import forget_unscaled
from lightning_unified.step.sharding.kept_shards import KeptShards
from lightning_unified.step.sharding.rows import local
from lightning_unified.step.sharding.shards import WholeShards

__all__ = ["ShardedUpdate"]

_ATTEMPTS = 3  # judgement: memory of caches and of other programs may be free at the next attempt


class ShardedUpdate(DistributedOptimization):
    """The optimizer step of ranks that hold different rows of each parameter."""

    _norm: Tensor | None = None
    _has_begun = False
    _replicas: WholeShards | KeptShards

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        if not self._has_begun:  # hooks of the fit's beginning are over
            self._has_begun = True
            with self._ranks.reporting_errors():
                self._replicas.refuse_hooks()
        return super().run(optimizer, batch_idx, kwargs)

    @override
    def before_weights(self, optimizer: Optimizer) -> None:
        if self._closes_window:
            if self._norm is None:
                self._norm = torch.zeros((), dtype=self._precise, device=self.trainer.strategy.root_device)
            if self._attempt is not None:
                self._phase = "optimizer step"
                if self._policy.options.optimizer_rollback:
                    self._attempt.before_weights(optimizer)
        self._meet(Point.BEFORE_WEIGHTS, then=Point.UPDATE)

    @property
    def _precise(self) -> torch.dtype:
        """The most precise format of the device."""
        return torch.float32 if self.trainer.strategy.root_device.type == "mps" else torch.float64

    def clip_by_norm(self, optimizer: Optimizer, largest: float) -> None:
        """Scale the gradients of all ranks so that their common norm is at most `largest`.

        As `torch.nn.utils.clip_grad_norm_`, whose sum over ranks a rank without memory would leave the others waiting in.
        """
        gradients = [
            local(one.grad) for group in optimizer.param_groups for one in group["params"] if one.grad is not None
        ]
        norm = self._norm
        assert norm is not None, "the norm is clipped within an optimizer step"
        _, reason = caught(lambda: norm.copy_(_squares(gradients, norm)))
        if reason is not None:
            raise MemoryError(reason)  # reported at the end of the attempt; the others read it at the meeting below
        self._meet(Point.UPDATE, then=Point.UPDATE)
        self._ranks.average(norm)  # the sum: ranks have not divided
        with torch.no_grad():
            scale = (largest / (norm.sqrt() + 1e-6)).clamp_(max=1.0)
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.dtype))

    def updating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure for the optimizer: `closure`, and then a meeting before weights are written."""

        def then_meet() -> Any:
            result = closure()
            self._meet(Point.UPDATE, then=Point.AFTER_WEIGHTS)
            return result

        return then_meet

    @override
    def _after_weights(
        self, outputs: dict[str, Any] | None, reason: str | None
    ) -> tuple[dict[str, Any] | None, str | None]:
        optimizer = self.trainer.optimizers[0]
        for _ in range(_ATTEMPTS):
            if reason is None or not self._restored():
                break
            self._distributed_policy.watch.release()
            _, again = caught(optimizer.step)
            if again is None:
                self._distributed_policy.report_repeated_update(reason)
                outputs, reason = self._finish_update(), None
            else:
                reason = again
        words = self._ranks.meet(Point.AFTER_WEIGHTS, _outcome(reason), text=reason or "")
        self._next = Point.GRADIENTS
        failed = [word for word in words if word.outcome is not Outcome.WELL]
        if not failed:
            return outputs, None
        self._ranks.end()
        if reason is None:
            raise RankError(
                f"rank {failed[0].rank} ran out of memory while the optimizer wrote its rows of the weights ({failed[0].text}), and this "
                "rank has written its own; resume from the last checkpoint."
            )
        raise self._final_error(reason)

    def _restored(self) -> bool:
        """Write back this rank's copies of weights and optimizer state; return False if it has none."""
        attempt, copies = self._attempt, self._policy.options.optimizer_rollback
        return attempt is not None and copies and attempt.restore_weights()

    def _final_error(self, reason: str) -> Exception:
        if not self._policy.options.optimizer_rollback:
            return HalfUpdatedError(
                f"memory ran out while the optimizer wrote weights ({reason}), and no other rank has this rank's rows. Resume from the last "
                "checkpoint with optimizer_rollback=True, which keeps a copy to go back to."
            )
        return OutOfMemoryError(
            f"the optimizer's step does not fit on rank {self._ranks.rank} ({reason}). Give this rank as much memory as the others, use more "
            "ranks, or choose an optimizer that needs less (fused=True, SGD)."
        )

    def _finish_update(self) -> dict[str, Any]:
        """Finish the step after an update that succeeded at another attempt."""
        forget_unscaled(self.trainer)
        self.optim_progress.optimizer.step.increment_completed()
        result = cast("ClosureResult", cast("Closure", self._closure).consume_result())
        return {} if result.loss is None else result.asdict()


def _outcome(reason: str | None) -> Outcome:
    return Outcome.WELL if reason is None else Outcome.WRITTEN


def _squares(gradients: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the sum of the squares of all entries, in the format of `like`."""
    if not gradients:
        return torch.zeros_like(like)
    norms = torch._foreach_norm(list(gradients))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([norm.to(like.dtype) for norm in norms]).square().sum()
