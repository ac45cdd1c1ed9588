"""What a step under one setting of the memory options takes and lasts at least, told from the user's own step before it is traced."""

from collections.abc import Callable, Sequence

import lightning as L

from lightning_unified.cost_model.memory.lower_bound import is_within, least_bytes
from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.rates.cost import least_seconds
from lightning_unified.cost_model.trace.trace import Trace, Work
from lightning_unified.nn.blocks import find_blocks
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.settings import Setting

__all__ = ["Bounds"]


class Bounds:
    """What the user's own step tells of others.

    Args:
        module: Whose blocks are recomputed.
        own: The user's own setting.
        step: Gives the trace of the step under it, in as few parts as may be.
        sizes: Rows of each micro-batch of that.

    Attributes:
        own: The user's own setting.
    """

    def __init__(
        self, module: L.LightningModule, own: Setting, step: Callable[[], Trace], *, sizes: Sequence[int]
    ) -> None:
        self.own = own
        self._module, self._step, self._sizes = module, step, sizes

    def seconds(self, setting: Setting, *, rates: Rates) -> Callable[[int], float]:
        """Return what tells, by the number of micro-batches, the seconds that no step under a setting is faster than.

        They are those of the own step, of what runs again, and of each micro-batch's start.

        A loss in chunks is taken to be no faster than as the module computes it; of an optimizer's other kernel nothing is said.

        Args:
            setting: How the memory options are set.
            rates: Of the machine.
        """
        own = self.own
        if setting.precision != own.precision or (own.again and setting != own):
            return lambda _: 0.0
        again = frozenset() if setting == own else self._names_again(setting)
        keeps = setting.recompute is not None and setting.recompute.keep_attention

        def runs_again(work: Work) -> bool:
            return is_within(work.place, again) and not (keeps and "attention" in work.op)

        return least_seconds(
            lambda _rows, _parts: self._step(),
            self._sizes,
            rates,
            again=runs_again,
            optimizer=setting.optimizer_kernel == own.optimizer_kernel,
        )

    def bytes(self, setting: Setting) -> Callable[[int], int] | None:
        """Return what tells, by the rows of the smallest micro-batch, what a step under a setting takes at least; None if nothing is known.

        Args:
            setting: How the memory options are set, otherwise than the user's own.
        """
        own = self.own
        recomputes = setting.recompute is not None and setting.recompute.blocks != 0
        again = self._names_again(setting)
        differs = setting.precision != own.precision or setting.optimizer_kernel != own.optimizer_kernel or own.again
        if setting == own or differs or (recomputes and not again):
            return None
        only = None if setting.loss_chunk == own.loss_chunk else self._names(RecomputePolicy(blocks="all"))
        return lambda rows: least_bytes(self._step(), rows, without=again, only=only)

    def _names_again(self, setting: Setting) -> frozenset[str]:
        """Return the names of the blocks that run again."""
        policy = setting.recompute
        return frozenset() if policy is None or policy.blocks == 0 else self._names(policy)

    def _names(self, policy: RecomputePolicy) -> frozenset[str]:
        """Return the names of the blocks that a policy is about; none if there are none."""
        try:
            chosen = set(map(id, policy.choose(find_blocks(self._module).plain)))
        except ValueError:
            return frozenset()
        return frozenset(name for name, child in self._module.named_modules() if id(child) in chosen)
