"""All facts about a batch, its module and the run's progress, before the batch runs."""

from typing import Any

import lightning as L

from lightning_unified.step.exactness.facts.carried import CarriedRows
from lightning_unified.step.exactness.facts.figures import HostFigures
from lightning_unified.step.exactness.facts.profile import Fact, facts_of
from lightning_unified.step.exactness.facts.progress import Counters, ModuleFacts, OutsideFacts
from lightning_unified.step.results.merging import MergeTable

__all__ = ["BatchFacts"]


class BatchFacts:
    """Reads the facts that may decide how a step computes on a batch.

    Args:
        trainer: The Trainer.
        counters: The counters of the run's progress that the step reads.
        host_figures: Figures of the batch's tensors, from before they were moved to the device.
        written: The merge rules of written state.
    """

    def __init__(self, trainer: L.Trainer, counters: Counters, host_figures: HostFigures, written: MergeTable) -> None:
        self._trainer, self._counters, self._host_figures = trainer, counters, host_figures
        self._module, self._outside = ModuleFacts(trainer.lightning_module), OutsideFacts(trainer.lightning_module)
        self._carried = CarriedRows(written)

    def of(self, batch: Any, rows: int, now: tuple[int, int]) -> frozenset[Fact]:
        """Return the facts about a batch; `now` holds its epoch and its number in the epoch."""
        trainer, counters = self._trainer, self._counters
        return (
            facts_of(batch, rows, self._host_figures)
            | counters.facts(epoch=now[0], step=trainer.global_step, batch=now[1])
            | counters.figures(trainer)
            | self._module.now()
            | self._outside.now()
            | self._carried.facts(now, rows)
        )
