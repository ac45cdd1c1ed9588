"""The plan of a fit on several ranks: each rank decides, and all apply one common plan.

The same three steps as on one rank, with an exchange between the second and the third: gather, decide, agree, apply. The exchange comes
before any collective operation of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from typing_extensions import override

from lightning_unified.cost_model.search import Choice
from lightning_unified.errors import DryRunError
from lightning_unified.planner.first_batch.decide import decide
from lightning_unified.planner.first_batch.first_step import FirstStep
from lightning_unified.planner.first_batch.planning import Decision, StepPlanning, set_memory_options
from lightning_unified.planner.first_batch.step_budget import StepBudget
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.planner import Planner
from lightning_unified.step.ranks.consensus import Point, Ranks
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.split import BatchShape

__all__ = ["DistributedFirstStep", "DistributedPlanning", "Offer", "settled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The outcome of a combination of memory options on one rank.

    Attributes:
        fits: Whether the rank's batch fits under it at some micro-batch size.
        seconds: The predicted seconds of the rank's step.
        needs: Bytes that the step needs at its best micro-batch size.
    """

    fits: bool
    seconds: float
    needs: float


class DistributedFirstStep(FirstStep):
    """Plans on every rank; all ranks agree on memory options and a micro-batch size.

    Args:
        reduction_bytes: Bytes that each rank holds on its device to average gradients.
        planning: Makes `planning`, from the arguments of `DistributedPlanning`.
        others: Further arguments of `FirstStep`.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: DistributedPolicy,
        *,
        precision: str,
        ranks: Ranks,
        reduction_bytes: int,
        planning: "Callable[..., DistributedPlanning] | None" = None,
        **others: Any,
    ) -> None:
        super().__init__(
            trainer,
            policy,
            precision=precision,
            reduction_bytes=reduction_bytes,
            planning=partial(planning or DistributedPlanning, ranks=ranks),
            **others,
        )

    @override
    def look(self, batch: Any, shape: BatchShape | None, *, step: Callable[[Any], ClosureResult]) -> None:
        super().look(batch, shape, step=step)
        assert isinstance(self.planning, DistributedPlanning)
        self.planning.agree(shape)

    @override
    def _begin_kind(self) -> None:
        """Discard nothing.

        All ranks share their sizes, and only this rank may have seen the new kind of batch.
        """


class DistributedPlanning(StepPlanning):
    """Decides for one rank's batch, and applies the plan that all ranks agree on.

    At the first batch, each rank sends the combination of memory options that it would set. If these differ, each rank answers with the
    outcome of every one of them. The fastest combination that fits on all ranks wins, timed by the slowest rank. Then all ranks take the
    smallest micro-batch size, as after a failure. A rank that cannot trace its step, or gains nothing from a plan, follows the others. A
    rank whose smallest plan does not fit ends all ranks before weights are written.

    Longer rows reach ranks at different times. A rank then plans with the agreed memory options, and sizes are joined after the batch.
    """

    def __init__(
        self, trainer: L.Trainer, policy: DistributedPolicy, budget: StepBudget, *, precision: str, ranks: Ranks
    ) -> None:
        super().__init__(trainer, policy, budget, precision=precision)
        self._distributed_policy, self._ranks = policy, ranks
        self._has_agreed = False
        self._mine: Decision | None = None
        self._settled: Combination | None = None

    @override
    def combinations(self) -> list[Combination]:
        if not self._has_agreed:
            return super().combinations()
        return [self._settled] if self._settled is not None else super().combinations()[:1]

    @override
    def apply(self, decision: Decision, shape: BatchShape | None) -> None:
        """Keep the first decision until all ranks agree; apply later ones at once."""
        if self._has_agreed:
            super().apply(decision, shape)
        else:
            self._mine = decision

    @override
    def plan_length(self, batch: Any, shape: BatchShape) -> bool:
        """Return False: each length gets its own plan, because ranks have seen different lengths."""
        return False

    def agree(self, shape: BatchShape | None) -> None:
        """Agree on memory options and sizes with the other ranks, once at the first batch."""
        if self._has_agreed:
            return
        self._has_agreed, mine = True, self._mine
        answers = self._ranks.exchange(Point.PLAN, None if mine is None else mine.plan.combination)
        wanted = list(dict.fromkeys(combination for combination in answers if combination is not None))
        if not wanted:
            self._distributed_policy.join_sizes()
            return
        chosen, choices = wanted[0], {}
        if len(wanted) > 1:
            choices = (
                {} if mine is None else {combination: self._choice(mine.planner, combination) for combination in wanted}
            )
            offers = self._ranks.exchange(
                Point.PLAN, {combination: _offer(found) for combination, found in choices.items()}
            )
            chosen = settled(wanted, offers)
        self._settled = chosen
        self._apply_settled(chosen, choices.get(chosen), shape)
        self._distributed_policy.join_sizes()
        self._predict_joined(shape)
        self._mine = None  # it holds the batch

    def _choice(self, planner: Planner, combination: Combination) -> Choice | None:
        assert self.speeds is not None
        try:
            return planner.choose([combination], budget_bytes=self._budget.left, rates=self.speeds.rates)
        except DryRunError:
            return None

    def _apply_settled(self, chosen: Combination, choice: Choice | None, shape: BatchShape | None) -> None:
        mine = self._mine
        if mine is None:
            set_memory_options(self._policy, chosen, why="as planned by the other ranks")
            return
        if mine.plan.combination == chosen or choice is None:
            plan = replace(mine.plan, combination=chosen)
        else:
            budget = self._budget.left
            plan = decide(
                replace(
                    mine.inputs,
                    combinations=(chosen,),
                    choice=choice,
                    budget_bytes=budget,
                    beside_bytes=self._budget.beside,
                )
            )
        self.apply(replace(mine, plan=plan), shape)

    def _predict_joined(self, shape: BatchShape | None) -> None:
        """Predict the step again if another rank asked for a smaller micro-batch size."""
        if self._mine is None or self.prediction is None or shape is None or self._settled is None:
            return
        rows = self._policy.sizes.micro_batch_size(shape)
        if rows < self.prediction.rows:
            self.prediction = self._mine.planner.predict(self._settled, micro_batch_size=rows)
            self.reason = f"{self.reason}; micro-batch size {rows}, as the most careful rank has it"


def settled(wanted: Sequence[Combination], offers: Sequence[dict[Combination, Offer]]) -> Combination:
    """Return the combination that fits on all ranks and is fastest on the slowest rank.

    If none fits on all ranks, it is the one that needs the least memory.

    Args:
        wanted: The combinations that ranks would set, in the order of the ranks.
        offers: Each rank's outcome of all of these; empty for a rank that cannot tell.
    """

    def rank_of(combination: Combination) -> tuple[bool, float, int]:
        known = [offer[combination] for offer in offers if combination in offer]
        fits = all(one.fits for one in known)
        cost = max((one.seconds if fits else one.needs for one in known), default=0.0)
        return not fits, cost, wanted.index(combination)

    return min(wanted, key=rank_of)


def _offer(choice: Choice | None) -> Offer:
    if choice is None:
        return Offer(fits=False, seconds=float("inf"), needs=float("inf"))
    best = choice.best or min(choice.alternatives, key=lambda one: one.reserved_bytes)
    return Offer(fits=choice.best is not None, seconds=best.seconds, needs=best.reserved_bytes)
