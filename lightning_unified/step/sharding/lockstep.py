"""The training step of ranks that hold shards: all run the same passes, and leave and repeat them together.

FSDP2 gathers each block before its forward and its backward pass, and reduces its gradients after it. So a step is full of
collectives, and no rank may fail alone in it:

    MICRO_BATCHES  ranks agree on the number of micro-batches: that of the rank that needs the most
    CHECK          ranks run exactness checks together, each on the batch of the rank that asks for it (`checks`)
    GATHER         a vote before each collective, when its buffers are allocated: a rank that ran out of memory votes once,
                   and all leave the step
    GRADIENTS      a vote at the end of the passes, as for ranks that run alone
    …              the optimizer's part, in `update`

After a step that all have left, each rank resets what FSDP2 keeps of it, undoes it and repeats it with more micro-batches. A vote also
compares the collective that each rank is about to run. If these differ, because a module takes another path on one rank, all ranks end.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import ConfigurationError, RankError
from lightning_unified.step.encoders import encoders_of
from lightning_unified.step.evaluation import EvaluationSteps
from lightning_unified.step.exactness.facts.graph import stop_gradients
from lightning_unified.step.loop.planner import StepPlanner
from lightning_unified.step.policy.memory_policy import STAGES
from lightning_unified.step.ranks.consensus import Outcome, Point, Ranks, Word
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.recovery.sizes import MicroBatchSize
from lightning_unified.step.sharding.checks import ShardedChecks
from lightning_unified.step.sharding.kept_shards import KeptShards, refuse_other_collectives
from lightning_unified.step.sharding.update import ShardedUpdate
from lightning_unified.step.split import BatchShape

__all__ = ["LockstepEvaluation", "LockstepOptimization", "inside_root", "split_obstacle"]


class LockstepOptimization(ShardedUpdate):
    """Runs one optimization step on all ranks in lockstep."""

    _shape: BatchShape | None = None

    def __init__(
        self,
        trainer: L.Trainer,
        policy: DistributedPolicy,
        *,
        ranks: Ranks,
        shards: KeptShards,
        broadcast_buffers: bool,
        planner: StepPlanner | None = None,
    ) -> None:
        super().__init__(
            trainer, policy, ranks=ranks, replicas=shards, broadcast_buffers=broadcast_buffers, planner=planner
        )
        self._shards = shards
        self._batches.check_together(
            ShardedChecks(ranks, shards, device=trainer.strategy.root_device, meet=self._meet_for_check)
        )

    def _meet_for_check(self, digest: int) -> list[Word]:
        return self._meet(Point.CHECK, then=self._next, digest=digest)

    @override
    def _plan_and_count(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape | None, *, batch_idx: int) -> None:
        super()._plan_and_count(kwargs, shape, batch_idx=batch_idx)
        window = self._window
        # FSDP2 averages gradients before they are divided, so all ranks need one unit
        if window is not None and window.is_new:
            words = self._meet(Point.CHECK, then=self._next, terms=window.terms)
            window.unit = max(word.terms for word in words) or 1.0

    @override
    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        if not self._policy.options.recover:  # no attempt has agreed, and none votes
            self._agree(self._batches.splitter.shape(next(iter(kwargs.values()))))
        return super()._make_closure(kwargs, optimizer, batch_idx)

    def _agree(self, shape: BatchShape | None) -> None:
        """Agree on the number of micro-batches, and vote from here on."""
        if agree_on_num_micro_batches(self._ranks, self._policy.sizes, shape) > 1:
            _refuse_split(self.trainer, self._distributed_policy, "fit")
        self._shards.collectives.vote = self._vote

    @override
    def has_terms(self) -> bool:
        return True  # every rank runs every backward pass

    @override
    def backward_micro_batch(
        self, loss: Tensor, optimizer: Optimizer, *, share: float | None, first: bool, kept: Sequence[Tensor]
    ) -> Tensor:
        if not super().has_terms():
            stop_gradients(loss)
        return super().backward_micro_batch(loss, optimizer, share=share, first=first, kept=kept)

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        try:
            return super().run(optimizer, batch_idx, kwargs)
        finally:
            self._shards.leave(failed=False)

    @override
    def _run_and_recover(
        self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]", *, shape: BatchShape | None
    ) -> dict[str, Any]:
        self._shape = shape
        return super()._run_and_recover(optimizer, batch_idx, kwargs, shape=shape)

    @override
    def _run_attempt(self, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
        self._agree(self._shape)
        outputs, reason = super()._run_attempt(run)
        self._shards.leave(failed=reason is not None)
        return outputs, reason

    def _vote(self, collective: str) -> None:
        refuse_other_collectives(self._meet(Point.GATHER, then=self._next, digest=zlib.crc32(collective.encode())))


class LockstepEvaluation(EvaluationSteps):
    """Runs evaluation steps on all ranks in lockstep.

    If one rank has no memory for a batch, all repeat it.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: DistributedPolicy,
        *,
        ranks: Ranks,
        shards: KeptShards,
        planner: StepPlanner | None = None,
    ) -> None:
        super().__init__(trainer, policy, planner=planner)
        self._ranks, self._shards, self._distributed_policy = ranks, shards, policy
        self._heard: list[str] = []
        self._group = ShardedChecks(ranks, shards, device=trainer.strategy.root_device, meet=self._meet_for_check)

    @override
    def _attempt(
        self, step: Callable[..., Any], batch: Any, rest: list[Any], *, shape: BatchShape | None, phase: str
    ) -> Any:
        with self._ranks.reporting_errors():
            if agree_on_num_micro_batches(self._ranks, self._policy.evaluation_sizes, shape) > 1:
                _refuse_split(self._trainer, self._distributed_policy, STAGES[phase])
            self._heard = []

            def freed(*args: Any) -> Any:
                output = step(*args)
                self._shards.free()  # a check begins from shards
                return output

            def all_run() -> Any:
                output = super(LockstepEvaluation, self)._attempt(freed, batch, rest, shape=shape, phase=phase)
                self._meet()
                return output

            self._shards.collectives.vote = self._vote
            output, reason = caught(all_run)
            if reason is not None and not self._heard:
                self._ranks.meet(Point.GATHER, Outcome.SHORT, text=reason)
            self._shards.leave(failed=reason is not None)
        if reason is not None:
            raise MemoryError(reason)
        return output

    def _meet_for_check(self, digest: int) -> list[Word]:
        return self._meet(digest, point=Point.CHECK)

    def _meet(self, digest: int = 0, *, point: Point = Point.GATHER) -> list[Word]:
        """Meet the other ranks within an attempt.

        Raises:
            MemoryError: If one of them ran out of memory.
        """
        words = self._ranks.meet(point, digest=digest)
        if short := [word for word in words if word.outcome is not Outcome.WELL]:
            self._heard.append(f"rank {short[0].rank} ran out of memory: {short[0].text}")
            raise MemoryError(self._heard[0])
        return words

    def _vote(self, collective: str) -> None:
        refuse_other_collectives(self._meet(zlib.crc32(collective.encode())))


def agree_on_num_micro_batches(ranks: Ranks, sizes: MicroBatchSize, shape: BatchShape | None) -> int:
    """Let all ranks run as many micro-batches as the one that needs the most; return their number.

    Raises:
        RankError: If this rank's batch has fewer rows than that.
    """
    sizes.num_micro_batches = 1
    needed = 1 if shape is None or sizes.runs_whole else len(sizes.micro_batches(shape))
    words = ranks.meet(Point.MICRO_BATCHES, digest=needed)
    num_micro_batches = max(word.digest for word in words)
    sizes.num_micro_batches = num_micro_batches
    own = 1 if shape is None else len(sizes.micro_batches(shape))
    if own != num_micro_batches:
        sizes.num_micro_batches = 1
        rows = "a batch that is not split" if shape is None else f"a batch of {shape.rows} rows"
        raise RankError(
            f"rank {ranks.rank} has {rows}, and another rank runs its batch in {num_micro_batches} micro-batches: "
            'with hold="shards" all ranks run the same number. Give every rank batches of as many rows, or hold="parameters".'
        )
    return num_micro_batches


def split_obstacle(trainer: L.Trainer, policy: DistributedPolicy, stage: str) -> ConfigurationError | None:
    """Return why batches of a stage cannot be split in lockstep, as an error; None if they can."""
    if encoders_of(trainer, policy, stage) is not None:
        return ConfigurationError(
            'hold="shards" cannot run encoders in chunks (MicroBatchRules(encoders=…)): the number of passes would differ between ranks; give '
            'hold="parameters".'
        )
    return None


def _refuse_split(trainer: L.Trainer, policy: DistributedPolicy, stage: str) -> None:
    """Raise if batches of a stage cannot be split in lockstep."""
    if (error := split_obstacle(trainer, policy, stage)) is not None:
        raise error


@contextmanager
def _redirected(module: nn.Module, method: Callable[..., Any]) -> Iterator[None]:
    """Let the next call of `module` run `method` instead of its forward."""
    own = vars(module).get("forward")

    def put_back() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        put_back()  # the method may call the module
        return method(*args, **kwargs)

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        put_back()


def inside_root(module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a module's `method`, run inside the hooks of its forward.

    These gather the parameters that belong to no block. `training_step` may call layers of the module without calling the module.
    """
    if not isinstance(module, FSDPModule):
        return method(*args, **kwargs)
    with _redirected(module, partial(method, *args, **kwargs)):
        result: Any = module()  # without the batch, which an `mp_policy` of the root would cast
    return result
