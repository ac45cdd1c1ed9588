"""Levels at which a step holds logged, returned and written numbers, as facts.

A step may hold a mean at a level: `log(norm.clamp(max=1))`, or log 0 where a mean is small. The mean of the micro-batches is the whole batch's while no
micro-batch reaches the level, and it is not when some do. A step may also log a flag. The largest flag of the micro-batches is that of the
whole batch if one row is enough to set it, and it is by chance if most rows set it.

| numbers that merge by | what a fact tells |
|---|---|
| a mean or a sum | whether some micro-batches, but not all, have one number, a round one, or the largest or smallest of a batch before |
| the largest or smallest | the share of rows of the micro-batches that have it, in quarters, if all are one of two round numbers |

Numbers that are counts of rows or terms, divided by all of these, are often equal by chance, and tell nothing.
"""

from collections.abc import Collection, Sequence
from math import ceil, isfinite

__all__ = ["EXTREMES", "Levels", "name_of"]

EXTREMES = frozenset({"max", "min"})

_ROUND = 1024  # multiples of 1 / 1024 are round; float32 numbers about 1 are by chance once in 2^13
_ROUNDING = 1e-4
_PARTS = 4  # of all rows; judgement: few, so that flags cost few checks


def name_of(path: str, rules: Collection[str]) -> str:
    """Return the name of a number, which tells whether the largest or the smallest merges it.

    Args:
        path: Its place among the results.
        rules: The merge rules that fit all checks so far.
    """
    extreme = next((rule for rule in sorted(rules) if rule in EXTREMES), None)
    return path if extreme is None or {*rules} - EXTREMES else f"{path}: {extreme}"


class Levels:
    """The largest and smallest of each number in the batches so far."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, float]] = {}

    def of(self, name: str, numbers: Sequence[float], counts: Sequence[tuple[float, float]]) -> str | None:
        """Return what a fact tells of one number of a batch; None if it tells nothing.

        Micro-batches whose number is not finite, such as a mean over no terms, are left out.

        Args:
            name: The name, as `name_of` returns it.
            numbers: The number in each micro-batch.
            counts: The loss terms and the rows of each micro-batch.
        """
        finite = [index for index, one in enumerate(numbers) if isfinite(one)]
        if not finite:
            return None
        numbers, counts = [numbers[index] for index in finite], [counts[index] for index in finite]
        ends = self._ends.get(name, ())
        self._ends[name] = min((*numbers, *ends)), max((*numbers, *ends))
        if len({*numbers}) == 1:
            return None
        extreme = name.rpartition(": ")[2]
        if extreme in EXTREMES:
            return _share(max(numbers) if extreme == "max" else min(numbers), numbers, [rows for _, rows in counts])
        held = len({*numbers}) < len(numbers) or any(_is_round(one) or one in ends for one in numbers)
        return "held" if held and not _are_shares(numbers, counts) else None


def _share(level: float, numbers: Sequence[float], rows: Sequence[float]) -> str | None:
    """Return the share of rows whose micro-batches have a flag, in quarters; or None.

    None means that the numbers are no flags.
    """
    if len({*numbers}) > 2 or not all(map(_is_round, numbers)):
        return None
    share = sum(count for one, count in zip(numbers, rows, strict=True) if one == level) / sum(rows)
    return f"{ceil(_PARTS * share)} of {_PARTS}"


def _is_round(number: float) -> bool:
    return (number * _ROUND).is_integer()


def _are_shares(numbers: Sequence[float], counts: Sequence[tuple[float, float]]) -> bool:
    """Return whether all numbers are counts divided by terms or rows of their micro-batches."""
    return any(
        all(
            abs(number * of[which] - round(number * of[which])) <= _ROUNDING * max(of[which], 1.0)
            for number, of in zip(numbers, counts, strict=True)
        )
        for which in (0, 1)
    )
