"""The micro-batch size in use: where it starts, and how it shrinks when memory runs out."""

from typing import Any

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
        self._asked = self.limit
        self.unit = 1

    def keep_together(self, unit: Any, *, whose: str) -> None:
        """Cut between units of `unit` rows only.

        Args:
            unit: The module's `micro_batch_unit`.
            whose: The module's name, for messages.

        Raises:
            ConfigurationError: If `unit` is no positive int, or larger than the size asked for.
        """
        if isinstance(unit, bool) or not isinstance(unit, int) or unit < 1:
            raise ConfigurationError(f"{whose}.micro_batch_unit is {unit!r}; it must be a positive number of rows.")
        if self._asked is not None and self._asked < unit:
            raise ConfigurationError(
                f"micro_batch_size={self._asked} is less than the {unit} rows that {whose} keeps together (micro_batch_unit); "
                f'give {unit} or more, or "auto".'
            )
        self.unit = unit

    def parts(self, rows: int) -> list[int]:
        """Return the rows of each micro-batch that a batch of `rows` is cut into."""
        limit = rows if self.limit is None else max(self.limit // self.unit, 1) * self.unit
        return part_sizes(rows, limit=limit, unit=self.unit)

    def at_once(self, rows: int) -> int:
        """Return the rows of the largest micro-batch that a batch of `rows` is cut into, whether or not it can be."""
        return (
            max(self.parts(-(-rows // self.unit) * self.unit)) if self.limit is not None and rows > self.limit else rows
        )

    def shrink(self, failed: int) -> bool:
        """Halve below `failed` rows, in whole units; return False if `failed` was the smallest that can be."""
        if failed <= self.unit:
            return False
        self.limit = max(failed // 2 // self.unit, 1) * self.unit
        return True
