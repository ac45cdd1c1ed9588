"""The plan of a fit on several ranks: each traces its own batch, and all act on one decision, before anything collective."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from typing_extensions import override

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.search import Choice
from lightning_unified.errors import DryRunError
from lightning_unified.planner.first_step import FirstStep
from lightning_unified.planner.planner import Planner
from lightning_unified.planner.setting import Setting
from lightning_unified.step.ranks.consensus import Point, Ranks
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.split import BatchShape

__all__ = ["DistributedFirstStep", "Offer", "settled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a setting of the memory options comes to on one rank.

    Attributes:
        fits: Whether the rank's batch fits under it, in some size.
        seconds: Predicted of its step.
        needs: Bytes that its best way to cut takes.
    """

    fits: bool
    seconds: float
    needs: float


class DistributedFirstStep(FirstStep):
    """Has every rank plan for its own first batch, and then go on with one setting of the memory options and the smallest micro-batch.

    At the first batch ranks tell each other what they would set, and if that differs, what each of these settings would come to for
    them: the fastest that fits everywhere is taken, timed by the slowest rank. Then sizes are joined, as after a failure. A rank that
    cannot trace its step, or gains nothing by it, takes what the others settle. One whose smallest plan does not fit ends all
    ranks, before weights are written. Rows that are longer come to ranks at different times: a rank then plans with the memory options as
    they are, and sizes are joined after the batch.

    Args:
        trainer: The fit's.
        policy: Whose sizes and memory options are set.
        precision: That the fit runs in, by Lightning's name.
        ranks: All of them.
        reduction_bytes: What each rank holds on its device to average gradients.
    """

    def __init__(
        self, trainer: L.Trainer, policy: DistributedPolicy, *, precision: str, ranks: Ranks, reduction_bytes: int
    ) -> None:
        super().__init__(trainer, policy, precision=precision, reduction_bytes=reduction_bytes)
        self._distributed_policy, self._ranks = policy, ranks
        self._has_agreed = False
        self._mine: tuple[Planner, Setting, Prediction, str] | None = None
        self._settled: Setting | None = None

    @override
    def look(self, batch: Any, shape: BatchShape | None, *, step: Callable[[Any], ClosureResult]) -> None:
        super().look(batch, shape, step=step)
        if not self._has_agreed:
            self._has_agreed = True
            self._agree(shape)
            self._mine = None  # it holds the batch

    @override
    def _begin_kind(self) -> None:
        """Forget nothing: sizes are the ranks' together, and a kind of batch may be one that this rank alone has seen."""

    @override
    def _settings(self) -> list[Setting]:
        if not self._has_agreed:
            return super()._settings()
        return [self._settled] if self._settled is not None else super()._settings()[:1]

    @override
    def _act(
        self, planner: Planner, setting: Setting, prediction: Prediction, shape: BatchShape | None, *, reason: str
    ) -> None:
        if self._has_agreed:
            super()._act(planner, setting, prediction, shape, reason=reason)
        else:
            self._mine = planner, setting, prediction, reason

    def _agree(self, shape: BatchShape | None) -> None:
        """Settle memory options and sizes with the other ranks; each of them comes here at its first batch."""
        mine = self._mine
        said = self._ranks.exchange(Point.PLAN, None if mine is None else mine[1])
        wanted = list(dict.fromkeys(setting for setting in said if setting is not None))
        if not wanted:
            self._distributed_policy.join_sizes()
            return
        chosen, choices = wanted[0], {}
        if len(wanted) > 1:
            choices = {} if mine is None else {setting: self._choice(mine[0], setting) for setting in wanted}
            offers = self._ranks.exchange(Point.PLAN, {setting: _offer(found) for setting, found in choices.items()})
            chosen = settled(wanted, offers)
        self._settled = chosen
        self._adopt_settled(chosen, choices.get(chosen), shape)
        self._distributed_policy.join_sizes()
        self._predict_joined(shape)

    def _choice(self, planner: Planner, setting: Setting) -> Choice | None:
        assert self._speeds is not None
        try:
            return planner.choose([setting], budget_bytes=self._left(), rates=self._speeds.rates)
        except DryRunError:
            return None

    def _adopt_settled(self, chosen: Setting, choice: Choice | None, shape: BatchShape | None) -> None:
        if self._mine is None:
            self._set_memory_options(chosen, why="as planned by the other ranks")
            return
        planner, own, prediction, reason = self._mine
        if own == chosen or choice is None:
            super()._act(planner, chosen, prediction, shape, reason=reason)
        else:
            setting, prediction, reason = self._chosen(choice, planner, budget=self._left())
            self._act(planner, setting, prediction, shape, reason=reason)

    def _predict_joined(self, shape: BatchShape | None) -> None:
        """Predict what runs, where another rank asked for fewer rows at once."""
        if self._mine is None or self._prediction is None or shape is None or self._settled is None:
            return
        rows = self._policy.sizes.micro_batch_size(shape)
        if rows < self._prediction.rows:
            self._prediction = self._mine[0].predict(self._settled, micro_batch_size=rows)
            self.reason = f"{self.reason}; {rows} rows at once, as the most careful rank has it"


def settled(wanted: Sequence[Setting], offers: Sequence[dict[Setting, Offer]]) -> Setting:
    """Return the setting that fits on all ranks and is fastest on the slowest; if none fits on all, the one that needs least.

    Args:
        wanted: What ranks would set, in their order.
        offers: What each rank says of all of these; of nothing, if it cannot tell.
    """

    def rank_of(setting: Setting) -> tuple[bool, float, int]:
        said = [offer[setting] for offer in offers if setting in offer]
        fits = all(one.fits for one in said)
        cost = max((one.seconds if fits else one.needs for one in said), default=0.0)
        return not fits, cost, wanted.index(setting)

    return min(wanted, key=rank_of)


def _offer(choice: Choice | None) -> Offer:
    if choice is None:
        return Offer(fits=False, seconds=float("inf"), needs=float("inf"))
    best = choice.best or min(choice.alternatives, key=lambda one: one.reserved_bytes)
    return Offer(fits=choice.best is not None, seconds=best.seconds, needs=best.reserved_bytes)
