"""What repeats with each micro-batch of a step: found by comparing a step of two with a step of three."""

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
    """A step of three micro-batches is one of two with stretches put in; of k, with each of them k - 2 times.

    The long stretch is a micro-batch's forward and backward; short ones after it are what is done once for each of its results.
    A storage that begins in a stretch and ends in it, or in the next copy, does so in every one; one that lives until after the
    last (a part's outputs, which are joined at the end) lives from each of them until there.

    Attributes:
        stretches: Each equals the slots before it.
        short: The step of two micro-batches.
        long: The step of three.
    """

    stretches: tuple[Stretch, ...]
    short: Timeline
    long: Timeline

    def timeline(self, parts: int) -> tuple[Timeline, Integers]:
        """Return the step of `parts` micro-batches, and for each of its slots the one in `short` that it is a copy of."""
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
        """Return where storages begin and end with `more` copies of each stretch than the step of three has.

        The copies lie before the stretch that is there already, so that everything from it on moves.
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
        """Return the figures of a step of three without those of the stretches that were put in.

        Raises:
            MisalignedError: If they are not those of the slots before them.
        """
        both, inside = values.reshape(2, -1), []
        for at, length in self.stretches:
            inside += range(at, at + length)
            differ = (both[:, at : at + length] != both[:, at - length : at]).any(axis=0)
            if differ.any():
                raise MisalignedError(
                    "the third micro-batch of a step is not like the second: "
                    f"{describe_slot(self.long, at + int(np.flatnonzero(differ)[0]))} in another size. Trace the number of "
                    "micro-batches that is asked for."
                )
        return np.delete(both, inside, axis=1).ravel()


def repeat_of(short: Timeline, long: Timeline) -> Repeat:
    """Return what a third micro-batch adds to a step of two.

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
                f"{here + 1}, with 3 parts, {describe_slot(long, there)}. Trace the number of micro-batches that is asked for."
            )
        stretches.append((there, length))
        same = common(keys[here:], longer[there + length :])
        here, there = here + same, there + length + same
    return Repeat(stretches=tuple(stretches), short=short, long=long)


def _repeated(keys: Sequence[tuple[str, ...]], longer: Sequence[tuple[str, ...]], *, at: int, most: int) -> int:
    """Return the length of the stretch at `at` that repeats the slots before it and goes on longest as `keys` do; 0 for none."""
    lengths = [
        length
        for length in range(1, most + 1)
        if longer[at - length] == longer[at] and longer[at - length : at] == longer[at : at + length]
    ]
    return max(lengths, key=lambda length: (common(keys, longer[at + length :]), -length), default=0)
