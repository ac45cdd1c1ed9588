"""How many tokens a completion may have, learnt from how long completions are."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CompletionBudget"]

_STEP = 16  # limits are multiples of it: a limit that moves by single tokens changes nothing but shapes
_STANDARD_ERRORS = 2.0


class CompletionBudget:
    """Begins with the most that is allowed and follows the lengths of completions that come to their own end.

    A policy whose answers have 80 tokens and that may use 512 pays for 512 whenever one of its completions fails to stop, in time and in
    the memory of the loss pass. The limit is `headroom` times the length by which all but `most_cut` of the recent completions have ended.
    Those that were cut count as longer than any. Some policies never stop in a share of their completions, which no limit helps: the share
    that had no end at `most` is known from when the limit was there, falls when fewer are cut, and is not held against a lower limit. Where
    more than `most_cut` beyond it are cut, the limit is doubled. When it rises, what was seen under the lower one is forgotten.

    It is a bound on an estimate from the last `window` completions: until a change of the policy has filled that many, more may be cut.
    Memory is planned for `most`, so no limit needs a new plan.

    Args:
        most: The longest a completion may ever be, in tokens.
        least: The limit never falls below it.
        most_cut: The share of completions that the limit may cut among those that would have ended by `most`.
        headroom: By how much the limit exceeds what recent completions needed, so that they may grow without being cut.
        window: Completions that are remembered.

    Attributes:
        limit: The most tokens of the next completions.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self, most: int, *, least: int = 16, most_cut: float = 0.02, headroom: float = 1.25, window: int = 256
    ) -> None:
        if most < 1 or least < 1:
            raise ValueError(f"most={most} and least={least}: a completion has at least 1 token.")
        if not 0 < most_cut < 1:
            raise ValueError(f"most_cut={most_cut} is a share of completions; give more than 0 and less than 1.")
        if headroom < 1:
            raise ValueError(f"headroom={headroom} would cut what recent completions needed; give 1 or more.")
        self._enough = math.ceil(1 / most_cut)
        if window < self._enough:
            raise ValueError(
                f"window={window} completions cannot show a share of {most_cut}; give {self._enough} or more of them."
            )
        self.most, self.least, self.most_cut, self.headroom = most, min(least, most), most_cut, headroom
        self.limit = most
        self._lengths: deque[int | None] = deque(maxlen=window)  # None: cut
        self._endless = 0.0

    @property
    def cut(self) -> float:
        """The share of the remembered completions that did not come to their own end."""
        return sum(length is None for length in self._lengths) / max(len(self._lengths), 1)

    @property
    def endless(self) -> float:
        """The share that is taken to have no end by `most` either."""
        return self._endless

    def observe(self, lengths: Sequence[int], ended: Sequence[bool]) -> None:
        """Take in completions that were sampled under `limit`, and set it for the next.

        Args:
            lengths: Tokens of each, the one that ended it included.
            ended: Which came to their own end; the others were cut.
        """
        self._lengths.extend(length if has_ended else None for length, has_ended in zip(lengths, ended, strict=True))
        if len(self._lengths) < self._enough:
            return
        cut, seen = self.cut, len(self._lengths)
        if self.limit == self.most:
            self._endless = cut
        else:
            self._endless = min(self._endless, cut + _STANDARD_ERRORS * math.sqrt(cut * (1 - cut) / seen))
        wanted = 2 * self.limit if cut - self._endless > self.most_cut else self._wanted()
        limit = self.limit if wanted is None else min(self.most, max(self.least, wanted))
        if limit > self.limit:  # what was cut under the lower one says nothing of this one
            self._lengths.clear()
        self.limit = limit

    def _wanted(self) -> int | None:
        """Return the limit that recent completions ask for, or None where too few have ended to tell."""
        ends = sorted(length for length in self._lengths if length is not None)
        # of those that end by `most`, cut ones included as far as they are not endless, so many must have ended
        needed = math.ceil((1 - self.most_cut) * (1 - self._endless) * len(self._lengths))
        if len(ends) < max(needed, self._enough // 2):
            return None
        return _STEP * math.ceil(self.headroom * ends[max(needed, 1) - 1] / _STEP)

    def state_dict(self) -> dict[str, Any]:
        """Return what it knows, for a checkpoint."""
        return {"limit": self.limit, "lengths": list(self._lengths), "endless": self._endless}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know that again; a limit above `most` becomes `most`."""
        self._lengths.clear()
        self._lengths.extend(state["lengths"])
        self._endless, self.limit = state["endless"], min(state["limit"], self.most)
