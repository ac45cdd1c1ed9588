"""Kinds of batches: a fit may imitate first and be rewarded then, and what was found for one kind of batch holds for no other."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Kinds"]

_MOST = 4  # kinds that are told apart; a fit of more is one whose batches differ by chance


class Kinds:
    """How long the rows were that were planned for, of each kind of batch."""

    def __init__(self) -> None:
        self._longest: dict[tuple[str, ...], int] = {}

    @property
    def any(self) -> bool:
        """Whether anything was planned for."""
        return bool(self._longest)

    def covers(self, batch: Any, elements: int) -> bool:
        """Return whether rows of this kind that are as long, or longer, were planned for."""
        return elements <= self._longest.get(self._of(batch), 0)

    def add(self, batch: Any, elements: int) -> bool:
        """Note that rows of this length are planned for; return whether other kinds came before this one, and it is new."""
        kind = self._of(batch)
        is_new = bool(self._longest) and kind not in self._longest
        self._longest[kind] = elements
        return is_new

    def _of(self, batch: Any) -> tuple[str, ...]:
        """Return what tells this kind from others, the type and the names of what a mapping holds; the last one's if there are many."""
        names = sorted(map(str, batch.keys())) if isinstance(batch, Mapping) else []
        kind = (type(batch).__name__, *names)
        return kind if kind in self._longest or len(self._longest) < _MOST else next(reversed(self._longest))
