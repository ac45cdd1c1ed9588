"""Find the part of a step that repeats with each micro-batch.

A step of two micro-batches is compared with a step of three: the slots that only the longer one has are the repeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_unified.cost_model.trace.timeline import NEVER, MisalignedError, Timeline, common, describe_slot

__all__ = ["Repeat", "repeat_of"]

Integers = NDArray[np.int64]
Stretch = tuple[int, int]  # slot of the longer step at which it begins, slots


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Repeat:
    """The slots that one more micro-batch inserts into a step.

    A step of three micro-batches is a step of two with stretches of slots inserted; a step of k holds each stretch k - 2
    times. The long stretch is the forward and backward pass of a micro-batch. Short stretches after it are operations that
    run once for each of its results.

    A storage that begins and ends within a stretch, or within the next copy, does so in every copy. A storage that lives
    until after the last copy (a micro-batch's outputs, which are merged at the end) lives from each copy until there.

    Attributes:
        stretches: First slot in the longer step and number of slots; each stretch equals the slots before it.
        short: Timeline of the step of two micro-batches.
        long: Timeline of the step of three.
    """

    stretches: tuple[Stretch, ...]
    short: Timeline
    long: Timeline

    def timeline(self, parts: int) -> tuple[Timeline, Integers]:
        """Return the timeline of a step of `parts` micro-batches, and each slot's original in `short`."""
        order = self._order(parts)
        if parts == 2:
            return self.short, order
        births, ends = self._lives(parts - 3)
        by_birth = np.argsort(births, kind="stable")
        slots = tuple(self.short.slots[at] for at in order.tolist())
        return Timeline(slots=slots, births=births[by_birth], ends=ends[by_birth]), order

    def _order(self, parts: int) -> Integers:
        pieces, since, before = [], 0, 0
        for at, length in self.stretches:
            here = at - before
            pieces += [np.arange(since, here), np.tile(np.arange(here - length, here), parts - 2)]
            since, before = here, before + length
        return np.concatenate([*pieces, np.arange(since, len(self.short.slots))])

    def _lives(self, more: int) -> tuple[Integers, Integers]:
        """Return births and ends of storages with `more` copies of each stretch beyond the step of three.

        The copies are inserted before the existing stretch, so everything from there on moves.
        """
        births, ends = self.long.births, self.long.ends
        moved_births, moved_ends = births.copy(), ends.copy()
        for at, length in self.stretches:
            moved_births += more * length * (births >= at)
            moved_ends += more * length * (ends > at)
        copied_births, copied_ends, before = [], [], 0
        copies = np.arange(1, more + 1)[:, None]
        for at, length in self.stretches:
            within = (births >= at - length) & (births < at)
            near = within & (ends <= at + length)
            moved_ends[near] = ends[near] + more * before
            copied_births.append((births[within] + more * before + copies * length).ravel())
            copied = np.where(near[within], moved_ends[within] + copies * length, moved_ends[within])
            copied_ends.append(copied.ravel())
            before += length
        all_ends = np.concatenate([moved_ends, *copied_ends])
        return np.concatenate([moved_births, *copied_births]), np.where(all_ends >= NEVER, NEVER, all_ends)

    def without(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the figures of a step of three without those of the inserted stretches.

        Raises:
            MisalignedError: If the figures of a stretch differ from those of the slots before it.
        """
        both, inside = values.reshape(2, -1), []
        for at, length in self.stretches:
            inside += range(at, at + length)
            differ = (both[:, at : at + length] != both[:, at - length : at]).any(axis=0)
            if differ.any():
                raise MisalignedError(
                    "the third micro-batch of a step differs from the second: "
                    f"{describe_slot(self.long, at + int(np.flatnonzero(differ)[0]))} in another size. Trace the number of "
                    "micro-batches requested."
                )
        return np.delete(both, inside, axis=1).ravel()


def repeat_of(short: Timeline, long: Timeline) -> Repeat:
    """Return the slots that a third micro-batch adds to a step of two.

    Raises:
        MisalignedError: If the longer step is not the shorter one with stretches of it repeated.
    """
    keys, longer = short.keys(), long.keys()
    stretches: list[Stretch] = []
    here = there = common(keys, longer)
    while here < len(keys) or there < len(longer):
        rest = len(longer) - there - (len(keys) - here)
        since = sum(stretches[-1]) if stretches else 0
        length = _repeated(keys[here:], longer, at=there, most=min(rest, there - since))
        if not length:
            raise MisalignedError(
                f"the third micro-batch of a step does not repeat the second: with 2 parts, {describe_slot(short, here)} at event "
                f"{here + 1}, with 3 parts, {describe_slot(long, there)}. Trace the number of micro-batches requested."
            )
        stretches.append((there, length))
        same = common(keys[here:], longer[there + length :])
        here, there = here + same, there + length + same
    return Repeat(stretches=tuple(stretches), short=short, long=long)


def _repeated(keys: Sequence[tuple[str, ...]], longer: Sequence[tuple[str, ...]], *, at: int, most: int) -> int:
    """Return the length of the stretch at `at` that repeats the slots before it; 0 for none.

    Of several lengths, the one after which `keys` continue longest is taken.
    """
    lengths = [
        length
        for length in range(1, most + 1)
        if longer[at - length] == longer[at] and longer[at - length : at] == longer[at : at + length]
    ]
    return max(lengths, key=lambda length: (common(keys, longer[at + length :]), -length), default=0)
