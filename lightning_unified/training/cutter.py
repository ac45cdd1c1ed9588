"""Counting and cutting the batches of one module, by its own hooks where it has them."""

from typing import Any

import lightning as L

from lightning_unified.errors import SplitError
from lightning_unified.training.split import BatchShape, cut, elements_per_row, num_rows

__all__ = ["Cutter"]


class Cutter:
    """Knows how the batches of `module` are cut.

    A module whose batches are of a kind of their own, such as batches of graphs, defines `split_batch(batch, start, stop)`, which
    returns rows `start` to `stop` as such a batch; and `count_rows(batch)`, if the rows cannot be seen from outside.

    Args:
        module: The module, with or without hooks.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._name = type(module).__name__
        self._split = getattr(module, "split_batch", None)
        self._count = getattr(module, "count_rows", None)
        self._splittable = getattr(module, "splittable", True) is not False

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
            raise SplitError(f"{self._name}.count_rows gave {rows!r}; it must give the number of rows, 1 or more.")
        return rows
