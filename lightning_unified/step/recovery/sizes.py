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

__all__ = ["Failure", "MicroBatchSize", "SizeEvidence"]

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


class SizeEvidence:
    """Sizes that ran, sizes that ran out of memory, and the batches without trouble since then."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._proven: list[tuple[int, int]] = []  # entries per row, and the micro-batch size that ran
        self._calm, self._patience = 0, _PATIENCE

    def __bool__(self) -> bool:
        return bool(self._failures or self._proven)

    @property
    def has_failures(self) -> bool:
        """Whether any size is known not to fit."""
        return bool(self._failures)

    def proves(self, elements: int, micro_batch_size: int) -> bool:
        """Return whether this size or a larger one has run, with rows of `elements` entries or more."""
        return any(known >= elements and rows >= micro_batch_size for known, rows in self._proven)

    def predict(self, elements: int, *, fits: int, refused: Failure) -> None:
        """Record a prediction as if both sizes had been tried."""
        self._failures.append(refused)
        self._proven.append((elements, fits))

    def failed(self, failure: Failure) -> None:
        """Record a size that does not fit, and drop records that it contradicts or makes redundant."""
        elements, rows = failure.elements, failure.rows
        self._failures = [known for known in self._failures if known.elements < elements or known.rows < rows]
        self._failures.append(failure)
        self._proven = [good for good in self._proven if good[0] < elements or good[1] < rows]
        if self._calm >= self._patience:
            self._patience *= 2
        self._calm = 0

    def worked(self, elements: int, micro_batch_size: int) -> None:
        """Record a size that fits."""
        if not self.proves(elements, micro_batch_size):
            self._proven = [good for good in self._proven if good[0] > elements or good[1] > micro_batch_size]
            self._proven.append((elements, micro_batch_size))
            if self._calm >= self._patience:
                self._calm = 0
        self._calm += bool(self._failures)

    @property
    def is_due(self) -> bool:
        """Whether to try failed sizes again: after each `patience` batches without trouble."""
        return bool(self._failures) and self._calm > 0 and self._calm % self._patience == 0

    @property
    def may_grow(self) -> bool:
        """Whether enough batches ran without trouble to try one micro-batch fewer."""
        return self._calm >= self._patience

    def forgive(self, room_bytes: int | None) -> bool:
        """Drop failures that had too little memory at the time; return whether there were any.

        A failure is dropped if there is now a quarter more memory than when it happened.

        Args:
            room_bytes: Bytes that the process could hold in total now; None if unknown.
        """
        if room_bytes is None:
            return False
        kept = [one for one in self._failures if one.room_bytes is None or room_bytes < _MORE_ROOM * one.room_bytes]
        forgiven, self._failures = len(kept) < len(self._failures), kept
        return forgiven

    def bounds(self, elements: int) -> tuple[int, int] | None:
        """Return the largest size known to fit rows of `elements` entries, 0 if none.

        Return also the smallest size that failed.

        The result is None if no size failed for such rows.
        """
        failed = [failure.rows for failure in self._failures if failure.elements <= elements]
        if not failed:
            return None
        bad = min(failed)
        return max((rows for known, rows in self._proven if known >= elements and rows < bad), default=0), bad

    def start_over(self) -> None:
        """Forget the sizes that failed, because a step now needs less memory."""
        self._failures, self._calm, self._patience = [], 0, _PATIENCE

    def forget_proven(self) -> None:
        """Forget the sizes that ran, because a step now may need more memory."""
        self._proven = []

    def forget(self) -> None:
        """Forget all evidence, because batches are of another kind from here on."""
        self.start_over()
        self.forget_proven()

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence as plain values."""
        return {
            "failures": [asdict(failure) for failure in self._failures],
            "proven": [list(good) for good in self._proven],
            "calm": self._calm,
            "patience": self._patience,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`."""
        self._failures = [Failure(**failure) for failure in state["failures"]]
        self._proven = [(elements, rows) for elements, rows in state["proven"]]
        self._calm, self._patience = state["calm"], state["patience"]


class MicroBatchSize:
    """The micro-batch size in use, for each shape of batch.

    Args:
        asked: The largest size allowed; `"auto"` starts from the whole batch.

    Attributes:
        asked: The size that the user asked for; None for `"auto"`.
        max_micro_batch_size: The largest size allowed, even if a larger one ran: as asked, or less under pressure; None
            for the whole batch.
        evidence: The sizes that ran and the sizes that failed.
        unit: Rows that stay together.
        least: The least number of rows in every micro-batch.
        num_micro_batches: The least number of micro-batches of the next batch, on which ranks in lockstep agree.
    """

    def __init__(self, asked: int | str) -> None:
        self.asked = self.max_micro_batch_size = None if isinstance(asked, str) else asked
        self.unit = self.least = self.num_micro_batches = 1
        self.evidence = SizeEvidence()

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
        if self.asked is not None and self.asked < unit:
            raise ConfigurationError(
                f"micro_batch_size={self.asked} is less than the {unit} rows that {whose} keeps together (MicroBatchRules(unit={unit})); "
                f'give {unit} or more, or "auto".'
            )
        self.unit, self.least = unit, least

    @property
    def runs_whole(self) -> bool:
        """Whether nothing limits the size, so that every batch runs whole."""
        return self.max_micro_batch_size is None and not self.evidence.has_failures and self.num_micro_batches == 1

    def micro_batches(self, shape: BatchShape) -> list[int]:
        """Return the rows of each micro-batch of a batch of this shape."""
        size = min(self._allowed(shape), -(-self._units(shape) // self.num_micro_batches) * self.unit)
        return split_rows(shape.rows, micro_batch_size=size, unit=self.unit, least=self.least)

    def micro_batch_size(self, shape: BatchShape) -> int:
        """Return the rows of the largest micro-batch of such a batch, even if it cannot be split."""
        if shape.rows <= self._allowed(shape) and self.num_micro_batches == 1:
            return shape.rows
        return max(self.micro_batches(BatchShape(rows=self._units(shape) * self.unit, elements=shape.elements)))

    def smallest(self, shape: BatchShape) -> int:
        """Return the smallest micro-batch size of such a batch."""
        rows = self._units(shape) * self.unit
        return max(split_rows(rows, micro_batch_size=self.unit, unit=self.unit, least=self.least))

    def is_proven(self, shape: BatchShape) -> bool:
        """Return whether the size in use has run before, with rows as long or longer."""
        return self.evidence.proves(shape.elements, self.micro_batch_size(shape))

    def plan(self, shape: BatchShape, *, micro_batch_size: int, refused: int, room_bytes: int | None) -> None:
        """Record a plan's prediction as if tried: `micro_batch_size` fits, `refused` does not."""
        failure = Failure(elements=shape.elements, rows=refused, room_bytes=room_bytes)
        self.evidence.predict(shape.elements, fits=micro_batch_size, refused=failure)

    def failed(self, shape: BatchShape, *, room_bytes: int | None) -> bool:
        """Record that the size in use does not fit; return False if it was the smallest possible."""
        micro_batch_size = self.micro_batch_size(shape)
        self.evidence.failed(Failure(elements=shape.elements, rows=micro_batch_size, room_bytes=room_bytes))
        return micro_batch_size > self.smallest(shape)

    def worked(self, shape: BatchShape) -> None:
        """Record that the size in use for such a batch fits."""
        self.evidence.worked(shape.elements, self.micro_batch_size(shape))

    def press(self, shape: BatchShape) -> bool:
        """Halve the size without evidence against it; return False if it was the smallest possible."""
        micro_batch_size = self.micro_batch_size(shape)
        if micro_batch_size <= self.smallest(shape):
            return False
        self.max_micro_batch_size = self._whole_units(micro_batch_size // 2)
        return True

    def relax(self, shape: BatchShape) -> bool:
        """Undo one halving by `press`; return False if there is none."""
        if self.max_micro_batch_size == self.asked or self.max_micro_batch_size is None:
            return False
        doubled = 2 * self.max_micro_batch_size
        enough = doubled >= shape.rows if self.asked is None else doubled >= self.asked
        self.max_micro_batch_size = self.asked if enough else doubled
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return plain values from which another run continues with the same sizes."""
        pressed = self.max_micro_batch_size if self.max_micro_batch_size != self.asked else None
        return {"limit": pressed, **self.evidence.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`.

        If the user has asked for a size since then, it stays the largest.
        """
        self.max_micro_batch_size = min((one for one in (state["limit"], self.asked) if one is not None), default=None)
        self.evidence.load_state_dict(state)

    def _allowed(self, shape: BatchShape) -> int:
        """Return the size for rows as long as this batch's; it may exceed the batch's rows."""
        most = shape.rows if self.max_micro_batch_size is None else self._whole_units(self.max_micro_batch_size)
        bounds = self.evidence.bounds(shape.elements)
        if bounds is None:
            return most
        good, bad = bounds
        known = self._whole_units(max(good, bad // 2))
        return min(most, self._larger(shape, known, bad=bad) if self.evidence.may_grow else known)

    def _larger(self, shape: BatchShape, known: int, *, bad: int) -> int:
        """Return the size with one micro-batch fewer than `known` needs, if it has not failed."""
        units = self._units(shape)
        count = -(-units // (known // self.unit))
        larger = self.unit * -(-units // (count - 1)) if count > 1 else known
        return larger if larger < bad else known

    def _units(self, shape: BatchShape) -> int:
        return -(-shape.rows // self.unit)

    def _whole_units(self, rows: int) -> int:
        return max(rows // self.unit, 1) * self.unit
