"""Lower bounds of a step's bytes and seconds under other memory options.

They are computed from the trace of the user's own step.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import lightning as L
from torch import nn

from lightning_unified.cost_model.memory.lower_bound import is_within, least_bytes
from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.rates.cost import least_seconds
from lightning_unified.cost_model.trace.trace import Trace, Work
from lightning_unified.nn.module_tree.blocks import find_blocks
from lightning_unified.nn.module_tree.walks import named_modules_of
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.search.combinations import Combination

__all__ = ["Bounds"]


class Bounds:
    """Lower bounds for combinations of memory options that have not been traced.

    They hold for one search, in which the module stays as it is.

    Args:
        module: The module, whose blocks may recompute their activations.
        own: The user's own combination of memory options, or the same with another attention. The bounds hold for this attention.
        step: Returns the trace of the step under `own`, in the fewest micro-batches allowed.
        sizes: The rows of each of these micro-batches.

    Attributes:
        own: As given.
    """

    def __init__(
        self, module: L.LightningModule, own: Combination, step: Callable[[], Trace], *, sizes: Sequence[int]
    ) -> None:
        self.own = own
        self._module, self._step, self._sizes = module, step, sizes
        self._least: dict[Any, tuple[Rates, Callable[[int], float]]] = {}

    def seconds(self, combination: Combination, *, rates: Rates) -> Callable[[int], float]:
        """Return a lower bound of the step's seconds, as a function of the number of micro-batches.

        The bound is the time of the user's own step, of its operations that run again, and of the start of each micro-batch. Another loss
        chunk needs the same products, and may need fewer passes over the logits: outside the blocks, only products count then. Another
        optimizer kernel may be faster by any factor, so the optimizer's time is then left out.
        """
        own = self.own
        if combination.precision != own.precision or (own.again and combination != own):
            return lambda _: 0.0
        keeps = combination.recompute is not None and combination.recompute.keep_attention
        in_chunks = keeps and combination.attention is not None  # its operations have no name of their own
        is_partial = combination.recompute is not None and combination.recompute.kept is not None
        unknown = combination == own or in_chunks or is_partial  # which operations run again
        again = frozenset() if unknown else self._names_again(combination)

        def runs_again(work: Work) -> bool:
            return is_within(work.place, again) and not (keeps and "attention" in work.op)

        optimizer = combination.optimizer_kernel == own.optimizer_kernel
        is_own_loss = combination.loss_chunk == own.loss_chunk
        blocks = frozenset() if is_own_loss else self._names(RecomputePolicy(blocks="all"))

        def counts(work: Work) -> bool:
            return is_own_loss or work.flops > 0 or is_within(work.place, blocks)

        key = again, keeps, optimizer, is_own_loss
        known = self._least.get(key)
        if known is None or known[0] is not rates:
            least = least_seconds(
                lambda _rows, _num_micro_batches: self._step(),
                self._sizes,
                rates,
                again=runs_again,
                counts=counts,
                optimizer=optimizer,
            )
            known = self._least[key] = rates, least
        return known[1]

    def bytes(self, combination: Combination) -> Callable[[int], int] | None:
        """Return a lower bound of the step's bytes; None if none is known.

        It is a function of the rows of the smallest micro-batch.
        """
        own = self.own
        recomputes = combination.recomputes
        again = self._names_again(combination)
        differs = (
            combination.precision != own.precision or combination.optimizer_kernel != own.optimizer_kernel or own.again
        )
        if combination == own or differs or (recomputes and not again):
            return None
        only = None if combination.loss_chunk == own.loss_chunk else self._names(RecomputePolicy(blocks="all"))
        return lambda rows: least_bytes(self._step(), rows, without=again, only=only)

    def _names_again(self, combination: Combination) -> frozenset[str]:
        """Return the names of the blocks that recompute activations."""
        policy = combination.recompute
        return frozenset() if policy is None or policy.blocks == 0 else self._names(policy)

    def _names(self, policy: RecomputePolicy) -> frozenset[str]:
        """Return the names of the blocks that a policy chooses; empty if the module has none."""
        chosen = set(map(id, policy.choose(list(self._blocks.values()))))
        return frozenset(name for name, block in self._blocks.items() if id(block) in chosen)

    @cached_property
    def _blocks(self) -> dict[str, nn.Module]:
        """The blocks that can recompute their activations, by name, in the order in which they run."""
        try:
            plain = find_blocks(self._module).plain
        except ValueError:
            return {}
        names = {id(child): name for name, child in named_modules_of(self._module).items()}
        return {names[id(block)]: block for block in plain}
