"""The micro-batch size in use, learnt from sizes that ran and sizes that ran out of memory.

A size that failed rules out itself and all larger ones, for rows as long or longer. A size that ran is known good for
rows as short or shorter. The next size to try lies between the two: half of the one that failed and, after enough
batches without trouble, one micro-batch fewer. A size that failed runs again only with new evidence: a quarter more
memory than it failed in. Pressure also lowers the size, without evidence against it, and the size returns step by step.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_unified.errors import ConfigurationError
from lightning_unified.step.split import BatchShape, split_rows

__all__ = ["Failure", "MicroBatchSize"]

_PATIENCE = 32  # judgement: batches in a row without trouble before a larger size is tried; doubled when that fails
_MORE_ROOM = 1.25  # judgement: a size that failed is tried again with a quarter more memory than it failed in


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A size that did not fit.

    Attributes:
        elements: Entries of the batch's tensors per row: a measure of how long or wide its rows were.
        rows: The micro-batch size.
        room_bytes: Bytes that the process could hold in total at that time; None if unknown.
    """

    elements: int
    rows: int
    room_bytes: int | None


class MicroBatchSize:
    """The largest number of rows that run at once, for each shape of batch.

    Args:
        asked: The largest number of rows allowed; `"auto"` starts from the whole batch.

    Attributes:
        limit: The largest size allowed, even if a larger one ran: as asked, or less under pressure; None for the
            whole batch.
        unit: Rows that stay together.
        least: The least number of rows in every micro-batch.
    """

    def __init__(self, asked: int | str) -> None:
        self.limit: int | None = None if isinstance(asked, str) else asked
        self.unit = self.least = 1
        self._asked = self.limit
        self._failures: list[Failure] = []
        self._proven: list[tuple[int, int]] = []
        self._calm, self._patience = 0, _PATIENCE

    @property
    def asked(self) -> int | None:
        """The size that the user asked for; None for `"auto"`."""
        return self._asked

    def keep_together(self, unit: Any, *, least: int = 1, whose: str) -> None:
        """Split between units of `unit` rows only, into micro-batches of `least` rows or more.

        Args:
            unit: Rows that stay together, of `MicroBatchRules`.
            least: Rows that the module's layers need to work at all.
            whose: The module's name, for messages.

        Raises:
            ConfigurationError: If `unit` is no positive int, or larger than the size asked for.
        """
        if isinstance(unit, bool) or not isinstance(unit, int) or unit < 1:
            raise ConfigurationError(f"{whose} keeps {unit!r} rows together; it must be a positive number of rows.")
        if self._asked is not None and self._asked < unit:
            raise ConfigurationError(
                f"micro_batch_size={self._asked} is less than the {unit} rows that {whose} keeps together (MicroBatchRules(unit={unit})); "
                f'give {unit} or more, or "auto".'
            )
        self.unit, self.least = unit, least

    @property
    def runs_whole(self) -> bool:
        """Whether nothing limits the size, so that every batch runs whole."""
        return self.limit is None and not self._failures

    def parts(self, shape: BatchShape) -> list[int]:
        """Return the rows of each micro-batch of a batch of this shape."""
        return split_rows(shape.rows, micro_batch_size=self._allowed(shape), unit=self.unit, least=self.least)

    def micro_batch_size(self, shape: BatchShape) -> int:
        """Return the rows of the largest micro-batch of such a batch, even if it cannot be split."""
        if shape.rows <= self._allowed(shape):
            return shape.rows
        units = -(-shape.rows // self.unit)
        return max(self.parts(BatchShape(rows=units * self.unit, elements=shape.elements)))

    def smallest(self, shape: BatchShape) -> int:
        """Return the smallest micro-batch size of such a batch."""
        units = -(-shape.rows // self.unit)
        return max(split_rows(units * self.unit, micro_batch_size=self.unit, unit=self.unit, least=self.least))

    @property
    def has_evidence(self) -> bool:
        """Whether any size is known to fit or not to."""
        return bool(self._failures or self._proven)

    def is_proven(self, shape: BatchShape) -> bool:
        """Return whether the size in use has run before, with rows as long or longer."""
        rows = self.micro_batch_size(shape)
        return any(elements >= shape.elements and known >= rows for elements, known in self._proven)

    def plan(self, shape: BatchShape, *, rows: int, refused: int, room_bytes: int | None) -> None:
        """Record a plan's prediction as if both were tried: `rows` rows fit, `refused` rows do not."""
        self._failures.append(Failure(elements=shape.elements, rows=refused, room_bytes=room_bytes))
        self._proven.append((shape.elements, rows))

    def failed(self, shape: BatchShape, *, room_bytes: int | None) -> bool:
        """Record that the size in use does not fit; return False if it was the smallest possible."""
        rows = self.micro_batch_size(shape)
        failure = Failure(elements=shape.elements, rows=rows, room_bytes=room_bytes)
        self._failures = [
            known for known in self._failures if known.elements < failure.elements or known.rows < failure.rows
        ]
        self._failures.append(failure)
        self._proven = [good for good in self._proven if good[0] < failure.elements or good[1] < failure.rows]
        if self._calm >= self._patience:
            self._patience *= 2
        self._calm = 0
        return rows > self.smallest(shape)

    def worked(self, shape: BatchShape) -> None:
        """Record that the size in use for such a batch fits."""
        rows = self.micro_batch_size(shape)
        if not self.is_proven(shape):
            self._proven = [good for good in self._proven if good[0] > shape.elements or good[1] > rows]
            self._proven.append((shape.elements, rows))
            if self._calm >= self._patience:
                self._calm = 0
        self._calm += bool(self._failures)

    def press(self, shape: BatchShape) -> bool:
        """Halve the size without evidence against it; return False if it was the smallest possible."""
        rows = self.micro_batch_size(shape)
        if rows <= self.smallest(shape):
            return False
        self.limit = self._whole_units(rows // 2)
        return True

    def relax(self, shape: BatchShape) -> bool:
        """Undo one halving by `press`; return False if there is none."""
        if self.limit == self._asked or self.limit is None:
            return False
        doubled = 2 * self.limit
        enough = doubled >= shape.rows if self._asked is None else doubled >= self._asked
        self.limit = self._asked if enough else doubled
        return True

    @property
    def is_due(self) -> bool:
        """Whether to try failed sizes again: after each `patience` batches without trouble."""
        return bool(self._failures) and self._calm > 0 and self._calm % self._patience == 0

    def forgive(self, room_bytes: int | None) -> bool:
        """Drop failures that had too little memory at the time; return whether there were any.

        A failure is dropped if there is now a quarter more memory than when it happened.

        Args:
            room_bytes: Bytes that the process could hold in total now; None if unknown.
        """
        if room_bytes is None:
            return False
        kept = [
            failure
            for failure in self._failures
            if failure.room_bytes is None or room_bytes < _MORE_ROOM * failure.room_bytes
        ]
        forgiven, self._failures = len(kept) < len(self._failures), kept
        return forgiven

    def start_over(self) -> None:
        """Forget the sizes that failed, because a step now needs less memory."""
        self._failures, self._calm, self._patience = [], 0, _PATIENCE

    def forget(self) -> None:
        """Forget all evidence, because batches are of another kind from here on."""
        self.start_over()
        self._proven = []

    def state_dict(self) -> dict[str, Any]:
        """Return plain values from which another run continues with the same sizes."""
        return {
            "limit": self.limit if self.limit != self._asked else None,
            "failures": [asdict(failure) for failure in self._failures],
            "proven": [list(good) for good in self._proven],
            "calm": self._calm,
            "patience": self._patience,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`.

        If the user has asked for a size since then, it stays the largest.
        """
        limits = [limit for limit in (state["limit"], self._asked) if limit is not None]
        self.limit = min(limits, default=None)
        self._failures = [Failure(**failure) for failure in state["failures"]]
        self._proven = [(elements, rows) for elements, rows in state["proven"]]
        self._calm, self._patience = state["calm"], state["patience"]

    def _allowed(self, shape: BatchShape) -> int:
        """Return the micro-batch size for rows as long as this batch's.

        It may exceed the batch's rows.
        """
        cap = shape.rows if self.limit is None else self._whole_units(self.limit)
        if not self._failures:
            return cap
        failed = [failure.rows for failure in self._failures if failure.elements <= shape.elements]
        if not failed:
            return cap
        bad = min(failed)
        good = max((rows for elements, rows in self._proven if elements >= shape.elements and rows < bad), default=0)
        known = self._whole_units(max(good, bad // 2))
        return min(cap, self._larger(shape, known, bad=bad) if self._calm >= self._patience else known)

    def _larger(self, shape: BatchShape, known: int, *, bad: int) -> int:
        """Return the size with one micro-batch fewer than `known` needs, if it has not failed."""
        units = -(-shape.rows // self.unit)
        parts = -(-units // (known // self.unit))
        larger = self.unit * -(-units // (parts - 1)) if parts > 1 else known
        return larger if larger < bad else known

    def _whole_units(self, rows: int) -> int:
        return max(rows // self.unit, 1) * self.unit
