"""The training step of several ranks: no collective starts before all ranks can join it.

A rank that ran out of memory cannot take part in the reduction that the others have begun, and they would wait for it forever. So
everything that may fail and be repeated lies between two meetings of the ranks, and contains no collective:

    forward and backward of every micro-batch    each rank for itself
    GRADIENTS                                    does every rank have its gradients? if not, all undo and repeat the batch
    gradients averaged, hooks                    collectives that every rank joins, even one that runs out of memory
    BEFORE_WEIGHTS                               did that succeed everywhere? if not, all undo and repeat the batch
    clipping and the optimizer's step            each rank for itself
    AFTER_WEIGHTS                                a rank whose step failed copies weights and state from one that succeeded
    logs written, first rank's buffers           the step's logs were held back, because `sync_dist=True` is a collective

A rank reports any other error at the next meeting, so that all ranks end.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any, cast

import lightning as L
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import RankError
from lightning_unified.step.loop import UnifiedOptimization
from lightning_unified.step.loop.planner import StepPlanner
from lightning_unified.step.ranks.consensus import Outcome, Point, Ranks, Word
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.ranks.reduction import Replicas
from lightning_unified.step.ranks.resync import resync
from lightning_unified.step.recovery.snapshot import forget_unscaled
from lightning_unified.step.results.logs import LogRecorder

__all__ = ["DistributedOptimization"]


class DistributedOptimization(UnifiedOptimization):
    """Runs one optimization step on every rank, each with its own batch.

    Gradients are those of `DistributedDataParallel` over whole batches: the mean of the ranks' own, reduced once for an
    accumulation window. A rank may split its batch into more micro-batches than another.

    With `broadcast_buffers`, all ranks copy the first rank's buffers after each optimizer step.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: DistributedPolicy,
        *,
        ranks: Ranks,
        replicas: Replicas,
        broadcast_buffers: bool,
        planner: StepPlanner | None = None,
    ) -> None:
        super().__init__(trainer, policy, planner=planner)
        self._ranks, self._replicas, self._distributed_policy = ranks, replicas, policy
        self._broadcast_buffers = broadcast_buffers
        self._next = Point.GRADIENTS
        self._closure: Closure | None = None
        self._logs = LogRecorder()

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        results = self.trainer.fit_loop.epoch_loop._results
        with self._ranks.reporting_errors():
            self._ranks.are_apart = True
            self._logs.forget()
            with self._logs.recording(results):
                outputs = super().run(optimizer, batch_idx, kwargs)
            # without recovery, no attempt has met here
            if self._next is Point.AFTER_WEIGHTS and self._closes_window:
                self._meet(Point.AFTER_WEIGHTS, then=Point.GRADIENTS)
            self._logs.flush(results)
            if self._broadcast_buffers and self._closes_window:
                self._replicas.copy_from_first()
        return outputs

    @override
    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        self._next = Point.GRADIENTS
        self._closure = super()._make_closure(kwargs, optimizer, batch_idx)
        return self._closure

    @override
    def _finish_gradients(self, optimizer: Optimizer) -> None:
        window = self._window
        words = self._meet(
            Point.GRADIENTS,
            then=Point.BEFORE_WEIGHTS,
            digest=self._distributed_policy.digest,
            terms=0.0 if window is None else window.terms,
            absent=self._replicas.absent() if self._closes_window else 0,
        )
        self._ranks.are_apart = False
        self._distributed_policy.compare(words)
        if not self._closes_window:
            return
        everywhere = reduce(and_, [word.absent for word in words])
        if any(word.absent != everywhere for word in words):
            self._next = Point.FILLED
            self._replicas.fill(everywhere)
            self._meet(Point.FILLED, then=Point.BEFORE_WEIGHTS)
        if window is not None:
            window.divide(self._trained(optimizer), total=sum(word.terms for word in words) / len(words))
        self._replicas.average_gradients(everywhere)

    @override
    def before_weights(self, optimizer: Optimizer) -> None:
        super().before_weights(optimizer)
        self._meet(Point.BEFORE_WEIGHTS, then=Point.AFTER_WEIGHTS)

    @override
    def _run_attempt(self, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
        self._next, self._distributed_policy.elsewhere, self._ranks.are_apart = Point.GRADIENTS, None, True
        outputs, reason = super()._run_attempt(run)
        if self._next is Point.AFTER_WEIGHTS and self._closes_window:
            outputs, reason = self._after_weights(outputs, reason)
        elif reason is not None and self._distributed_policy.elsewhere is None:
            self._ranks.meet(self._next, Outcome.SHORT, text=f"{self._phase}: {reason}")
        if reason is not None:
            self._logs.forget()
        return outputs, reason

    def _meet(self, point: Point, *, then: Point, **figures: Any) -> list[Word]:
        """Meet the others at `point`; the next meeting is at `then`.

        Raises:
            MemoryError: If another rank ran out of memory, so that this rank undoes its step too.
        """
        words = self._ranks.meet(point, **figures)
        short = [word for word in words if word.outcome is not Outcome.WELL]
        if short:
            self._distributed_policy.elsewhere = "; ".join(
                f"rank {word.rank} ran out of memory in {word.text}" for word in short
            )
            raise MemoryError(self._distributed_policy.elsewhere)
        self._next = then
        return words

    def _after_weights(
        self, outputs: dict[str, Any] | None, reason: str | None
    ) -> tuple[dict[str, Any] | None, str | None]:
        """Meet after the optimizer step; resync a rank whose step failed."""
        mine = Outcome.WELL
        if reason is not None:
            restored = self._attempt is None or self._attempt.restore_weights()
            mine = Outcome.SHORT if restored else Outcome.WRITTEN
            self._distributed_policy.watch.release()
        words = self._ranks.meet(Point.AFTER_WEIGHTS, mine, text=reason or "")
        self._next = Point.GRADIENTS
        well = [word.rank for word in words if word.outcome is Outcome.WELL]
        written = [word.rank for word in words if word.outcome is Outcome.WRITTEN]
        if len(well) == len(words):
            return outputs, None
        if not well and written:
            self._ranks.end()
            if mine is not Outcome.WRITTEN:
                raise RankError(
                    f"memory ran out on every rank while weights were written, and rank {written[0]} had written some; resume from the last "
                    "checkpoint, with an optimizer that needs no temporaries (fused=True) or with optimizer_rollback=True."
                )
        if not well:
            return None, reason
        optimizer = self.trainer.optimizers[0]
        resync(optimizer, self.trainer.precision_plugin, self._ranks, source=well[0], lacks=mine is not Outcome.WELL)
        # other ranks may have logged in hooks that the failed step did not reach; such logs would wait for this rank
        self._logs.keep(set.intersection(*self._ranks.exchange(Point.RESYNC, self._logs.names)))
        return (outputs if reason is None else self._finish_resynced(well[0], reason)), None

    def _finish_resynced(self, source: int, reason: str) -> dict[str, Any]:
        """Finish the step after a resync, as if the optimizer step had succeeded on this rank."""
        self._distributed_policy.report_resync(source, reason)
        forget_unscaled(self.trainer)
        self.optim_progress.optimizer.step.increment_completed()
        result = cast("ClosureResult", cast("Closure", self._closure).consume_result())
        return {} if result.loss is None else result.asdict()
