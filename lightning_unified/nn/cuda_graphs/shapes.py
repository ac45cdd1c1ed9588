"""The input shapes of a network's calls: which are known, and when they are recorded."""

from collections.abc import Container, Hashable

from lightning_unified.nn.cuda_graphs.calls import Call

__all__ = ["FEW", "SETTLED", "KnownShapes"]

SETTLED = 8  # judgement: calls in a row that bring no new shape before all shapes are recorded, if lengths vary
FEW = 4  # judgement: so many shapes that differ in rows only are those of micro-batches, their rest and a last, short batch
_STALE = 256  # judgement: calls without a shape after which another shape may take its place


class KnownShapes:
    """Shapes that may be recorded, with the number and the recency of their calls.

    Args:
        most: Number of shapes to record at most.
    """

    def __init__(self, *, most: int) -> None:
        self.most = most
        self._examples: dict[Hashable, Call] = {}
        self._last: dict[Hashable, int] = {}  # the number of the last call of each key
        self._again: set[Hashable] = set()  # keys with more than one call
        self._calls = self._quiet = 0

    def count_call(self, key: Hashable) -> bool:
        """Count a call; return whether its shape is known."""
        self._calls += 1
        if key not in self._examples:
            return False
        self._last[key] = self._calls
        return True

    def count_known_call(self, key: Hashable) -> bool:
        """Count a known shape without a recording; return whether no new shape is expected."""
        self._quiet += 1
        self._again.add(key)
        return self._is_plain or self._quiet >= SETTLED

    @property
    def _is_plain(self) -> bool:
        """Whether the known shapes are few and differ in their rows only."""
        return len(self._examples) <= FEW and len({one.form for one in self._examples.values()}) == 1

    @property
    def is_full(self) -> bool:
        """Whether no further shape can be added."""
        return len(self._examples) >= self.most

    def add(self, example: Call) -> None:
        """Add a new shape, with a call that its recording reads from."""
        self._examples[example.key], self._last[example.key] = example, self._calls

    def due(self, recorded: Container[Hashable]) -> list[Call]:
        """Return the shapes to record, out of those that are not `recorded`.

        They are all shapes if these are few and differ in their rows only, else those with more than one call. The largest is the
        first, because smaller shapes reuse its memory.
        """
        wanted = self._examples.keys() if self._is_plain else self._again
        found = [one for key, one in self._examples.items() if key in wanted and key not in recorded]
        return sorted(found, key=lambda one: one.elements, reverse=True)

    def unsettle(self) -> None:
        """Expect new shapes, until enough calls bring none."""
        self._quiet = 0

    def drop_stale(self) -> list[Hashable]:
        """Forget shapes without recent calls if no further shape can be added; return their keys.

        Shapes change with the micro-batch size, so old ones may have no more calls.
        """
        stale = [key for key, last in self._last.items() if self.is_full and self._calls - last > _STALE]
        for key in stale:
            del self._examples[key], self._last[key]
            self._again.discard(key)
        return stale

    def forget(self) -> None:
        """Forget all shapes."""
        self._examples.clear()
        self._again.clear()
        self._last.clear()
