"""Completion budget: a length limit that follows the lengths of recent completions."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CompletionBudget"]

_STEP = 16  # limits are multiples of it: a limit that moves by single tokens only creates new shapes
_STANDARD_ERRORS = 2.0


class CompletionBudget:
    """Length limit that starts at `most` and follows completions that end without truncation.

    A policy with answers of 80 tokens and a limit of 512 pays for 512, in time and memory, whenever one completion fails to stop. The
    limit is therefore `headroom` times a length: all recent completions but the share `most_cut` have ended there. Truncated
    completions count as longer than any other. Some policies never stop in a share of their completions, which no limit changes. This
    share is measured while the limit is `most`, falls when fewer are truncated, and does not raise a lower limit. If more than
    `most_cut` beyond it are truncated, the limit doubles. When the limit rises, observations under the lower one are dropped.

    The limit follows an estimate from the last `window` completions. After a change of the policy, more completions may be truncated
    until the window is full. Memory is planned for `most`, so no limit needs a new plan.

    Args:
        most: Upper bound of the limit, in tokens.
        least: Lower bound of the limit.
        most_cut: Share of completions that the limit may truncate among those that would end by `most`.
        headroom: Factor of the limit over the length of recent completions, so that they may grow.
        window: Number of recent completions.

    Attributes:
        limit: Limit of the next completions, in tokens.

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
        self._lengths: deque[int | None] = deque(maxlen=window)  # None: truncated
        self._endless = 0.0

    @property
    def cut(self) -> float:
        """Share of truncated completions in the window."""
        return sum(length is None for length in self._lengths) / max(len(self._lengths), 1)

    @property
    def endless(self) -> float:
        """Estimated share of completions that do not end by `most` either."""
        return self._endless

    def observe(self, lengths: Sequence[int], ended: Sequence[bool]) -> None:
        """Observe completions sampled under `limit`, and set the next limit.

        Args:
            lengths: Tokens of each, the ending token included.
            ended: Whether each ended by itself; the others were truncated.
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
        if limit > self.limit:  # truncation under the lower limit says nothing about this one
            self._lengths.clear()
        self.limit = limit

    def _wanted(self) -> int | None:
        """Return the limit for recent completions, or None if too few have ended."""
        ends = sorted(length for length in self._lengths if length is not None)
        # required number of ended completions among those that would end by `most`
        needed = math.ceil((1 - self.most_cut) * (1 - self._endless) * len(self._lengths))
        if len(ends) < max(needed, self._enough // 2):
            return None
        return _STEP * math.ceil(self.headroom * ends[max(needed, 1) - 1] / _STEP)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"limit": self.limit, "lengths": list(self._lengths), "endless": self._endless}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; a limit above `most` becomes `most`."""
        self._lengths.clear()
        self._lengths.extend(state["lengths"])
        self._endless, self.limit = state["endless"], min(state["limit"], self.most)
