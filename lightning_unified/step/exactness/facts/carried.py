"""Facts about state with an entry for each row, which a step may carry to the next batch.

A recurrent step may keep the hidden state of its rows, and use it where the next batch has as many rows (`if self.hidden.shape[1] ==
len(x)`). Neither the few rows of a check nor a micro-batch have, so gradients agree. Only a comparison of all rows shows the difference.
"""

from lightning_unified.step.exactness.facts.profile import SHARED, Fact
from lightning_unified.step.results.merging import MergeTable

__all__ = ["OF_ALL_ROWS", "CarriedRows"]

_CARRIED = "carried"
# kinds of facts for which all rows are compared: those that share a value may lie far apart
OF_ALL_ROWS = (SHARED, _CARRIED)


class CarriedRows:
    """Tells how the rows of a batch relate to those of the batch whose state the step may carry.

    Args:
        written: The rules for written state; state with an entry for each row is concatenated.
    """

    def __init__(self, written: MergeTable) -> None:
        self._written = written
        self._now: tuple[int, int] | None = None
        self._rows, self._relation = 0, "first"

    def facts(self, now: tuple[int, int], rows: int) -> frozenset[Fact]:
        """Return the facts about a split batch.

        Args:
            now: The epoch, and the number of the batch in it.
            rows: The rows of the batch.
        """
        if self._now is not None and now != self._now:
            (epoch, index), (then, before) = now, self._now
            is_next = (epoch, index) == (then, before + 1) or (epoch, index) == (then + 1, 0)
            # batches between may have run whole, with any number of rows
            self._relation = ("as many" if rows == self._rows else "others") if is_next else "unknown"
        self._now, self._rows = now, rows
        rules = {path: self._written.rule(path) for path in self._written.paths}
        return frozenset(
            (path, _CARRIED, self._relation) for path, rule in rules.items() if str(rule).startswith("concatenate")
        )
