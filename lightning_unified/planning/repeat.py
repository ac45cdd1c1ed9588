"""What repeats with each micro-batch of a step: found by comparing a step of two with a step of three."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_unified.planning.script import NEVER, MisalignedError, Script, common, describe_slot

__all__ = ["Repeat", "repeat_of"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Repeat:
    """A step of three micro-batches is one of two with a stretch put in; of k, with k - 2 such stretches.

    A storage that begins in a stretch and ends in it, or in the next, does so in every one; one that lives until after the last
    (a part's outputs, which are joined at the end) lives from each of them until there.

    Attributes:
        at: Slot before which the stretch is put in. It equals the stretch that ends there.
        length: Slots of the stretch.
        short: The step of two micro-batches.
        long: The step of three.
    """

    at: int
    length: int
    short: Script
    long: Script

    def script(self, parts: int) -> tuple[Script, NDArray[np.int64]]:
        """Return the step of `parts` micro-batches, and for each of its slots the one in `short` that it is a copy of."""
        count = len(self.short.slots)
        if parts == 2:
            return self.short, np.arange(count)
        begin, at, end = self.at - self.length, self.at, self.at + self.length
        births, ends, shift = self.long.births, self.long.ends, (parts - 3) * self.length
        later = np.where(ends > end, ends + shift, ends)  # what ends after the last stretch moves with it
        before, last = births < at, births >= at
        within = (births >= begin) & before
        copies = np.arange(1, parts - 2)[:, None] * self.length
        copied = np.where(ends[within] > end, later[within], ends[within] + copies)
        moved = np.concatenate([later[before], copied.ravel(), ends[last] + shift])
        stretch = self.short.slots[begin:at]
        script = Script(
            slots=self.short.slots[:at] + stretch * (parts - 2) + self.short.slots[at:],
            births=np.concatenate([births[before], (births[within] + copies).ravel(), births[last] + shift]),
            ends=np.where(moved >= NEVER, NEVER, moved),
        )
        order = np.concatenate([np.arange(at), np.tile(np.arange(begin, at), parts - 2), np.arange(at, count)])
        return script, order

    def without(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the figures of a step of three without those of the stretch that was put in.

        Raises:
            MisalignedError: If they are not those of the stretch before it.
        """
        both = values.reshape(2, -1)
        stretch, previous = both[:, self.at : self.at + self.length], both[:, self.at - self.length : self.at]
        if not np.array_equal(stretch, previous):
            slot = self.at + int(np.flatnonzero((stretch != previous).any(axis=0))[0])
            raise MisalignedError(
                f"the third micro-batch of a step is not like the second: {describe_slot(self.long, slot)} in another size. Rehearse "
                "the number of micro-batches that is asked for."
            )
        return np.delete(both, np.s_[self.at : self.at + self.length], axis=1).ravel()


def repeat_of(short: Script, long: Script) -> Repeat:
    """Return what a third micro-batch adds to a step of two.

    Raises:
        MisalignedError: If the longer step is not the shorter one with one stretch of it repeated.
    """
    keys, longer = short.keys(), long.keys()
    more, at = len(longer) - len(keys), common(keys, longer)
    repeated = more > 0 and at >= more and longer[at - more : at] == longer[at : at + more]
    if not repeated or longer[at + more :] != keys[at:]:
        raise MisalignedError(
            f"the third micro-batch of a step does not repeat the second: with 2 parts, {describe_slot(short, at)} at event {at + 1}, "
            f"with 3 parts, {describe_slot(long, at)}. Rehearse the number of micro-batches that is asked for."
        )
    return Repeat(at=at, length=more, short=short, long=long)
