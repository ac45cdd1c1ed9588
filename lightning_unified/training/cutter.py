"""Counting and cutting the batches of one module, by its own rules where it has them."""

from typing import Any

import lightning as L

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.training.split import BatchShape, cut, elements_per_row, num_rows

__all__ = ["Cutter"]


class Cutter:
    """Knows how the batches of `module` are cut.

    Args:
        module: The module whose batches they are.
        rules: Its rules; `rows.split` and `rows.count` replace what is found from the outside.
    """

    def __init__(self, module: L.LightningModule, rules: MicroBatchRules) -> None:
        self._name = type(module).__name__
        self._split, self._count = rules.rows.split, rules.rows.count
        self._splittable = rules.splittable

    def shape(self, batch: Any) -> BatchShape | None:
        """Return how large `batch` is; None for one that has no rows to count and runs whole."""
        if self._count is not None:
            rows = self._counted(batch)
        else:
            try:
                rows = num_rows(batch)
            except SplitError:
                return None
        return BatchShape(rows, elements_per_row(batch, rows))

    def require_shape(self, batch: Any) -> BatchShape | None:
        """Return how large `batch` is; None where the module does not want it cut.

        Raises:
            SplitError: If it has no rows to count.
        """
        shape = self.shape(batch)
        if shape is None and self._splittable:
            num_rows(batch)
        return shape

    def cut(self, batch: Any, start: int, stop: int, *, rows: int) -> Any:
        """Return rows `start` to `stop` of `batch`, which has `rows`."""
        return cut(batch, start, stop, rows=rows) if self._split is None else self._split(batch, start, stop)

    def _counted(self, batch: Any) -> int:
        rows = self._count(batch) if self._count is not None else None
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise SplitError(
                f"RowRules(count=…) of {self._name} returned {rows!r}; it must return the number of rows, 1 or more."
            )
        return rows
