"""What several ranks do about memory: each as one would, and all with the most careful one's sizes."""

import logging
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.ranks.consensus import Point, Ranks, Word
from lightning_unified.step.recovery.sizes import Failure
from lightning_unified.step.split import BatchShape

__all__ = ["DistributedPolicy", "most_careful"]

log = logging.getLogger("lightning_unified")

_TOGETHER = ("forward", "backward", "optimizer step")


class DistributedPolicy(MemoryPolicy):
    """Decides for one of several ranks, and keeps its sizes those of the others.

    A rank learns from its own batches as a single one would. With every batch it says what its sizes come to in one number; where
    these differ, ranks exchange what they have found after the batch, and all go on with the most careful of it: the union of what
    failed, the smallest limit under pressure, the shortest time without trouble, recomputation where one turned it on. So a size
    is given back when every rank has the memory for it. Sizes of evaluations, which each rank runs and recovers by itself, join
    them at the next training batch.

    Attributes:
        ranks: All of them, once processes are connected.
        elsewhere: Which other ranks ran out of memory in the attempt that failed, in words; None if this one did.
    """

    ranks: Ranks
    elsewhere: str | None = None
    _differ = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process keeps; it has no connection to the other ranks."""
        state = super().__getstate__()
        state.pop("ranks", None)
        return state

    @property
    def digest(self) -> int:
        """What this rank's sizes come to; 0 where its module's batches turned out to be no matter of size."""
        return 0 if self._refusal is not None else zlib.crc32(repr(self._found()).encode()) or 1

    def heard(self, words: Sequence[Word]) -> None:
        """Note whether the ranks' sizes differ."""
        self._differ = len({word.digest for word in words} - {0}) > 1

    @override
    def batch_done(self, shape: BatchShape | None) -> None:
        super().batch_done(shape)
        if self._differ:
            self.join_sizes()

    def join_sizes(self) -> None:
        """Go on with the most careful rank's sizes; all ranks call it together, and memory has run out on none of them."""
        before = self.sizes.state_dict()
        self._join()
        if self._verdict is None and self._before_watch is None and self.sizes.state_dict() != before:
            self._before_watch = before  # a batch that cannot be cut may go on whole

    @override
    def out_of_memory(
        self, *, phase: str, reason: str, shape: BatchShape | None, attempt: int, batch: Any = None
    ) -> None:
        if self.elsewhere is None or phase not in _TOGETHER:
            super().out_of_memory(phase=phase, reason=reason, shape=shape, attempt=attempt, batch=batch)
        else:
            self.watch.release()
            if self._verdict is None and self._before_failure is None and phase != "optimizer step":
                self._before_failure = self.sizes.state_dict()
            self._before_watch = None
            self._repeats(f"{self.elsewhere}; the step is repeated on all ranks")
            self._changed_by = f"smaller: {self.elsewhere}"
        if phase in _TOGETHER:
            self._join()

    def taken_over(self, source: int, reason: str) -> None:
        """Note that this rank's optimizer step failed and took its result from rank `source`."""
        self._repeats(
            f"out of memory in optimizer step ({reason}); weights and optimizer state are taken from rank {source}"
        )

    def _repeats(self, event: str) -> None:
        self.recoveries += 1
        self.events.append(event)
        log.warning("Rank %s: %s.", self.ranks.rank, event)

    def _found(self) -> dict[str, Any]:
        return {kind: value for kind, value in self.sizes_state().items() if kind != "fingerprint"}

    def _join(self) -> None:
        """Go on with what the most careful rank does; all ranks call it after the same batch or the same failed attempt."""
        self._differ = False
        found = self.ranks.exchange(Point.SIZES, self._found())
        if any(each["recomputes"] for each in found) and not self.recomputation.everything:
            self.recompute_more("as memory ran out on another rank")
        if self._refusal is not None:
            return
        # what was found without recomputation says nothing of a step with it
        found = [each for each in found if each["recomputes"] == self.recomputation.everything]
        self.sizes.load_state_dict(most_careful([each["training"] for each in found]))
        self.evaluation_sizes.load_state_dict(most_careful([each["evaluation"] for each in found]))
        self._remember()

    @override
    def _remember(self) -> None:
        if self.ranks.rank == 0:
            super()._remember()


def most_careful(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of `MicroBatchSize` that follows from what several of them have found."""
    states = list(states)
    failures = {Failure(**failure) for state in states for failure in state["failures"]}
    failures = {one for one in failures if not any(_rules_out(other, one) for other in failures if other != one)}
    proven = {(elements, rows) for state in states for elements, rows in state["proven"]}
    proven = {
        good
        for good in proven
        if not any(failure.elements <= good[0] and failure.rows <= good[1] for failure in failures)
    }
    proven = {
        good
        for good in proven
        if not any(other != good and other[0] >= good[0] and other[1] >= good[1] for other in proven)
    }
    return {
        "limit": min((state["limit"] for state in states if state["limit"] is not None), default=None),
        "failures": [
            {"elements": one.elements, "rows": one.rows, "room_bytes": one.room_bytes}
            for one in sorted(failures, key=lambda one: (one.elements, one.rows))
        ],
        "proven": [list(good) for good in sorted(proven)],
        "calm": min(state["calm"] for state in states),
        "patience": max(state["patience"] for state in states),
    }


def _rules_out(one: Failure, other: Failure) -> bool:
    """Return whether `one` says as much as `other`; of two that are equal but for the memory there was, the one with more of it does."""
    if (one.elements, one.rows) == (other.elements, other.rows):
        return other.room_bytes is not None and (one.room_bytes is None or one.room_bytes > other.room_bytes)
    return one.elements <= other.elements and one.rows <= other.rows
