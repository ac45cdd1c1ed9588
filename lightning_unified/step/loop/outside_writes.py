"""Writes of a step outside its module: entries of its batch, and the order to stop."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.results.kept_gradients import awaits_gradient, gradients_of
from lightning_unified.step.results.sameness import same
from lightning_unified.step.split.containers import tensors_in
from lightning_unified.step.undo import TRAINING_STEP
from lightning_unified.step.undo.functions import names_attribute

__all__ = ["OutsideWrites"]


class OutsideWrites:
    """Gives the whole batch the entries that its micro-batches get, and the Trainer one order to stop.

    A micro-batch of a dict is a dict of its own, which no callback sees. Entries with a row for each of its rows are put together; an entry that
    is the same in all micro-batches is taken as it is, and one that the step also returns (`batch["loss"] = loss; return batch`) from the merged
    outputs.

    Args:
        trainer: The Trainer.
        batch: The whole batch.
        micro_batches: Its micro-batches.
        rows: The rows of each micro-batch.
        is_read: Whether a hook may read the batch after the step; otherwise entries are not kept.
    """

    def __init__(
        self, trainer: L.Trainer, batch: Any, micro_batches: Sequence[Any], rows: Sequence[int], *, is_read: bool
    ) -> None:
        self._trainer, self._batch, self._micro_batches, self._rows = trainer, batch, micro_batches, rows
        self._keeps, self._is_read = is_read and isinstance(batch, MutableMapping), is_read
        self.begin()

    def begin(self) -> None:
        """Start over."""
        self._stops: list[bool] = []
        self._written: list[dict[Any, Any]] = []
        self._removed: list[set[Any]] = []

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Note what the step of micro-batch `index` writes inside the block."""
        trainer, batch = self._trainer, self._micro_batches[index]
        stops = trainer.should_stop
        before = dict(batch) if self._keeps else {}
        yield
        self._stops.append(trainer.should_stop)
        if not stops:
            trainer.should_stop = False  # until the whole batch is done
        if self._keeps:
            now = dict(batch)
            self._written.append({name: one for name, one in now.items() if before.get(name, self) is not one})
            self._removed.append(before.keys() - now.keys())

    def keeping(self, index: int) -> list[Tensor]:
        """Return the tensors of micro-batch `index` that await a gradient."""
        return [one for one in tensors_in(self._micro_batches[index]) if awaits_gradient(one)]

    def _finish_gradients(self) -> None:
        """Give the rows of the batch the gradients of those of its micro-batches."""
        columns = zip(tensors_in(self._batch), *map(tensors_in, self._micro_batches), strict=False)
        for whole, *parts in columns:
            gradients = gradients_of(parts)
            if gradients and whole.is_leaf and [len(one) for one in parts if one.dim()] == list(self._rows):
                whole.requires_grad_().grad = torch.cat(gradients)

    def finish(self, outputs: Sequence[ClosureResult], merged: Mapping[str, Any]) -> None:
        """Write to the whole batch and to the Trainer.

        Args:
            outputs: What the step returned for each micro-batch.
            merged: The outputs of the whole batch by name, the loss among them.

        Raises:
            SplitError: If only some of the steps stop the Trainer, or an entry cannot be put together.
        """
        if len(set(self._stops)) > 1 and names_attribute(self._trainer.lightning_module, TRAINING_STEP, "should_stop"):
            raise SplitError(
                "training_step sets trainer.should_stop for some micro-batches of a batch and not for others; set it in on_train_batch_end, which "
                "sees the whole batch's outputs, or declare MicroBatchRules(splittable=False)."
            )
        if any(self._stops):  # of the step, or of a signal's handler, which may run at any time
            self._trainer.should_stop = True
        if self._is_read:
            self._finish_gradients()
        for name in {name for written in self._written for name in written}:
            self._batch[name] = self._whole(name, outputs, merged)
        for name in set.intersection(*self._removed) if self._removed else ():
            self._batch.pop(name, None)

    def _whole(self, name: Any, outputs: Sequence[ClosureResult], merged: Mapping[str, Any]) -> Any:
        values = [written[name] for written in self._written if name in written]
        has_all = len(values) == len(self._rows)
        lengths = [len(one) if isinstance(one, Tensor) and one.dim() else None for one in values]
        if lengths == list(self._rows):
            return torch.cat([one.detach() for one in values])
        if has_all and all(same(one, values[0]) for one in values[1:]):
            return values[0]
        returned = [output.loss if name == "loss" else output.extra.get(name) for output in outputs]
        if has_all and name in merged and all(map(_is_returned, values, returned)):
            return merged[name]
        raise SplitError(
            f"training_step writes batch[{name!r}], and the entries of micro-batches cannot be put together; return it from training_step instead, "
            "or declare MicroBatchRules(splittable=False)."
        )


def _is_returned(written: Any, returned: Any) -> bool:
    """Return whether an entry is an output too; a loss without weight is no longer known."""
    return returned is None or same(recursive_detach(written), recursive_detach(returned))
