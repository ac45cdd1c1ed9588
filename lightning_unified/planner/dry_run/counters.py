"""Step counters of a dry run: saved before one traced step, restored before the next.

So both are the same step of a fit.
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from lightning_unified.nn.module_tree.walks import modules_of, tensors_of
from lightning_unified.planner.fake.known_values import Answers, set_value

__all__ = ["Counters"]

_PLAIN = (bool, int, float, str, type(None))


class Counters:
    """Saves and restores all values by which a step can tell its number in the fit.

    These are Lightning's progress, learning rates and schedulers' counts. They are also the numbers, strings and flags among the attributes
    of the module, its submodules and the optimizer's state. Tensors with known values, such as the optimizer's step counts, belong to them.
    """

    def __init__(self, module: L.LightningModule, trainer: L.Trainer, answers: Answers) -> None:
        self._module, self._trainer, self._answers = module, trainer, answers
        self._progress: list[dict[str, Any]] = []
        self._fetched = self._stepped = 0
        self._plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Tensor, Tensor]] = []

    def keep(self) -> None:
        """Save all counters."""
        loop = self._trainer.fit_loop.epoch_loop
        self._progress = [progress.state_dict() for progress in self._all_progress()]
        self._fetched, self._stepped = self._fetcher.fetched, loop._batches_that_stepped
        owners = list(self._owners())
        self._plain = [
            (owner, {name: value for name, value in owner.items() if isinstance(value, _PLAIN)}) for owner in owners
        ]
        kept = (value for owner in owners for value in owner.values() if isinstance(value, Tensor))
        known = ((tensor, self._answers.known(tensor)) for tensor in (*tensors_of(self._module)[1], *kept))
        with no_dispatch():
            self._values = [(tensor, value.clone()) for tensor, value in known if value is not None]

    def restore(self) -> None:
        """Restore all counters."""
        loop = self._trainer.fit_loop.epoch_loop
        for progress, kept in zip(self._all_progress(), self._progress, strict=True):
            progress.load_state_dict(kept)
        self._fetcher.fetched, loop._batches_that_stepped = self._fetched, self._stepped
        for owner, kept in self._plain:
            owner.update(kept)
        with no_dispatch():
            for tensor, value in self._values:
                set_value(tensor, value.clone())

    @property
    def _fetcher(self) -> Any:
        return self._trainer.fit_loop._data_fetcher

    def _all_progress(self) -> list[Any]:
        loop = self._trainer.fit_loop.epoch_loop
        return [loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress]

    def _owners(self) -> Iterator[dict[str, Any]]:
        for module in modules_of(self._module):
            yield vars(module)
        for config in self._trainer.lr_scheduler_configs:
            yield vars(config.scheduler)
        for optimizer in self._trainer.optimizers:
            yield from optimizer.param_groups
            yield from (state for state in optimizer.state.values() if isinstance(state, dict))
