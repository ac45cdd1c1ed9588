"""Completion budget: a length limit that follows the lengths of recent completions."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CompletionBudget"]

_STEP = 16  # limits are multiples of it: a limit that moves by single tokens only creates new shapes
_MOST_TRUNCATED = 0.02  # share of completions that the limit may truncate among those that would end by `most`
_HEADROOM = 1.25  # factor of the limit over the length of recent completions, so that they may grow
_WINDOW = 256  # number of recent completions
_ENOUGH = math.ceil(1 / _MOST_TRUNCATED)  # fewer completions cannot show such a share
_STANDARD_ERRORS = 2.0


class CompletionBudget:
    """Length limit that starts at `most` and follows completions that end without truncation.

    A policy with answers of 80 tokens and a limit of 512 pays for 512, in time and memory, whenever one completion fails to stop. The
    limit is therefore 1.25 times a length: 98 % of recent completions have ended there. Truncated completions count as longer than any
    other. Some policies never stop in a share of their completions, which no limit changes. This share is measured while the limit is
    `most`, falls when fewer are truncated, and does not raise a lower limit. If more than 2 % beyond it are truncated, the limit
    doubles. When the limit rises, observations under the lower one are dropped.

    The limit follows an estimate from the last 256 completions. After a change of the policy, more completions may be truncated until
    the window is full. Memory is planned for `most`, so no limit needs a new plan.

    Args:
        most: Upper bound of the limit, in tokens. The lower bound is 16 or, if less, `most`.

    Attributes:
        limit: Limit of the next completions, in tokens.

    Raises:
        ValueError: If `most` is below 1.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"most={most}: a completion has at least 1 token.")
        self.most = self.limit = most
        self._lengths: deque[int | None] = deque(maxlen=_WINDOW)  # None: truncated
        self._endless = 0.0  # estimated share of completions that do not end by `most` either

    def observe(self, lengths: Sequence[int], ended: Sequence[bool]) -> None:
        """Observe completions sampled under `limit`, and set the next limit.

        Args:
            lengths: Tokens of each, the ending token included.
            ended: Whether each ended by itself; the others were truncated.
        """
        self._lengths.extend(length if has_ended else None for length, has_ended in zip(lengths, ended, strict=True))
        seen = len(self._lengths)
        if seen < _ENOUGH:
            return
        truncated = self._lengths.count(None) / seen
        if self.limit == self.most:
            self._endless = truncated
        else:
            error = math.sqrt(truncated * (1 - truncated) / seen)
            self._endless = min(self._endless, truncated + _STANDARD_ERRORS * error)
        wanted = 2 * self.limit if truncated - self._endless > _MOST_TRUNCATED else self._wanted()
        limit = self.limit if wanted is None else min(self.most, max(_STEP, wanted))
        if limit > self.limit:  # truncation under the lower limit says nothing about this one
            self._lengths.clear()
        self.limit = limit

    def _wanted(self) -> int | None:
        """Return the limit for recent completions, or None if too few have ended."""
        ends = sorted(length for length in self._lengths if length is not None)
        # required number of ended completions among those that would end by `most`
        needed = math.ceil((1 - _MOST_TRUNCATED) * (1 - self._endless) * len(self._lengths))
        if len(ends) < max(needed, _ENOUGH // 2):
            return None
        return _STEP * math.ceil(_HEADROOM * ends[max(needed, 1) - 1] / _STEP)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"limit": self.limit, "lengths": list(self._lengths), "endless": self._endless}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; a limit above `most` becomes `most`."""
        self._lengths.clear()
        self._lengths.extend(state["lengths"])
        self._endless, self.limit = state["endless"], min(state["limit"], self.most)
