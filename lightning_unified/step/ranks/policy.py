"""The memory policy of several ranks, which all use the sizes of the most careful rank.

Each rank reacts to its own memory as a single process does.
"""

import logging
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from lightning_unified.errors import RecomputationError
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.ranks.consensus import Point, Ranks, Word
from lightning_unified.step.recovery.sizes import Failure
from lightning_unified.step.split import BatchShape

__all__ = ["DistributedPolicy", "most_careful"]

log = logging.getLogger("lightning_unified")

_TOGETHER = ("forward", "backward", "optimizer step")


class DistributedPolicy(MemoryPolicy):
    """The memory policy of one of several ranks: keeps its sizes equal to those of the others.

    A rank learns from its own batches, as a single process does. With every batch it sends a digest of its sizes. If
    digests differ, the ranks exchange their findings after the batch, and all continue with the most careful ones.
    These are the union of the sizes that failed, the smallest limit under pressure, and the fewest batches without
    trouble. Recomputation is on if one rank turned it on. So a size grows again once every rank has the memory for it.
    Each rank runs and repeats evaluations by itself. Their sizes are exchanged with those of the next training batch.

    Attributes:
        ranks: All ranks, once their processes are connected.
        elsewhere: Names the other ranks that ran out of memory in the failed attempt, as a sentence; None if this rank
            did.
    """

    ranks: Ranks
    elsewhere: str | None = None
    _differ = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without the connection to the other ranks."""
        state = super().__getstate__()
        state.pop("ranks", None)
        return state

    def connect(self, ranks: Ranks) -> None:
        """Take part in the exchanges of `ranks`; the first rank saves the sizes."""
        self.ranks = ranks
        self.sizing.writes_file = ranks.rank == 0

    @property
    def digest(self) -> int:
        """A number computed from this rank's sizes; 0 after a refusal to split.

        After a refusal, batches run whole because they do not split exactly.
        """
        return 0 if self.splits.refusal is not None else zlib.crc32(repr(self._found()).encode()) or 1

    def compare(self, words: Sequence[Word]) -> None:
        """Record whether the ranks' sizes differ."""
        self._differ = len({word.digest for word in words} - {0}) > 1

    @override
    def leave_unrecomputed(self, error: RecomputationError) -> None:
        raise error  # the other ranks have not seen it, and would wait for this one

    @override
    def batch_done(self, shape: BatchShape | None) -> None:
        super().batch_done(shape)
        if self._differ:
            self.join_sizes()

    def join_sizes(self) -> None:
        """Continue with the most careful rank's sizes.

        All ranks call it together, when none has run out of memory.
        """
        before = self.sizes.state_dict()
        self._join()
        if self.splits.verdict is None and self.sizing.before_overrun is None and self.sizes.state_dict() != before:
            self.sizing.before_overrun = before  # a batch that does not split exactly may run whole

    @override
    def out_of_memory(
        self, *, phase: str, reason: str, shape: BatchShape | None, attempt: int, batch: Any = None
    ) -> None:
        if self.elsewhere is None or phase not in _TOGETHER:
            super().out_of_memory(phase=phase, reason=reason, shape=shape, attempt=attempt, batch=batch)
        else:
            self._follow(self.elsewhere, phase=phase)
        if phase in _TOGETHER:
            self._join()

    def _follow(self, elsewhere: str, *, phase: str) -> None:
        """Repeat the step because another rank ran out of memory."""
        self.watch.release()
        sizing = self.sizing
        if self.splits.verdict is None and sizing.before_failure is None and phase != "optimizer step":
            sizing.before_failure = self.sizes.state_dict()
        sizing.before_overrun = None
        self._report_repeat(f"{elsewhere}; the step is repeated on all ranks")
        sizing.changed_by = f"smaller: {elsewhere}"

    def report_resync(self, source: int, reason: str) -> None:
        """Record that this rank's optimizer step failed and that it copied rank `source`'s state."""
        self._report_repeat(
            f"out of memory in optimizer step ({reason}); weights and optimizer state are taken from rank {source}"
        )

    def report_repeated_update(self, reason: str) -> None:
        """Record that this rank's optimizer step failed, and succeeded from the rank's own copies."""
        self._report_repeat(f"out of memory in optimizer step ({reason}); this rank repeated it from its own copies")

    def _report_repeat(self, event: str) -> None:
        self.recoveries += 1
        self.events.append(event)
        log.warning("Rank %s: %s.", self.ranks.rank, event)

    def _found(self) -> dict[str, Any]:
        return {kind: value for kind, value in self.sizing.state_dict().items() if kind != "fingerprint"}

    def _join(self) -> None:
        """Load the sizes of the most careful rank.

        All ranks call it after the same batch or the same failed attempt.
        """
        self._differ = False
        found = self.ranks.exchange(Point.SIZES, self._found())
        if any(each["recomputes"] for each in found) and not self.recomputation.everything:
            self.sizing.recompute_everything("as memory ran out on another rank")
        if self.splits.refusal is not None:
            return
        # sizes found without recomputation do not hold for a step with it
        found = [each for each in found if each["recomputes"] == self.recomputation.everything]
        self.sizes.load_state_dict(most_careful([each["training"] for each in found]))
        self.evaluation_sizes.load_state_dict(most_careful([each["evaluation"] for each in found]))
        self.sizing.save()


def most_careful(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the most careful state of several `MicroBatchSize` objects."""
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
    """Return whether `one` rules out all sizes that `other` does, so that `other` is redundant.

    Of two failures with equal rows and entries, the one with more memory rules out the other.
    """
    if (one.elements, one.rows) == (other.elements, other.rows):
        return other.room_bytes is not None and (one.room_bytes is None or one.room_bytes > other.room_bytes)
    return one.elements <= other.elements and one.rows <= other.rows
