"""The micro-batch size in use: where it starts, and how it shrinks when memory runs out."""

from lightning_unified.errors import ConfigurationError
from lightning_unified.training.split import part_sizes

__all__ = ["MicroBatchSize"]


class MicroBatchSize:
    """The largest number of rows that go through forward and backward at once.

    Args:
        start: Rows, never exceeded; `"auto"` starts from the whole batch.

    Raises:
        ConfigurationError: If `start` is neither a positive int nor `"auto"`.
    """

    def __init__(self, start: int | str) -> None:
        if start != "auto" and (isinstance(start, bool) or not isinstance(start, int) or start < 1):
            raise ConfigurationError(f'micro_batch_size={start!r}: give a number of rows (1, 2, 3, …) or "auto".')
        self.limit: int | None = None if isinstance(start, str) else start
        self.last: int | None = None

    def parts(self, rows: int, *, unit: int = 1) -> list[int]:
        """Return the rows of each micro-batch that a batch of `rows` is cut into; `last` remembers the largest of them."""
        limit = rows if self.limit is None else max(self.limit // unit, 1) * unit
        sizes = part_sizes(rows, limit=limit, unit=unit)
        self.last = max(sizes)
        return sizes

    def shrink(self, failed: int, *, unit: int = 1) -> bool:
        """Halve below `failed` rows, in whole units; return False if `failed` was the smallest that can be."""
        if failed <= unit:
            return False
        self.limit = max(failed // 2 // unit, 1) * unit
        return True
