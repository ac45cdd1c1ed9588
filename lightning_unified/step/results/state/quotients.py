"""Merge numbers that are the quotient of two others, such as the average of a meter.

A meter adds up a sum and a count, and keeps `self.avg = self.sum / self.count`. No mean of the micro-batches' averages is that of the whole batch,
because each holds all batches before too. But the quotient holds after every run. So checks look for two numbers of the same object or dict
whose quotient it is in all runs, as a share or in percent. A split batch then divides the merged numbers.

A number that no run writes, such as the sum after a batch of zeros, follows from the quotient and the other number.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.state.entries import refusal_of_merge

__all__ = ["has_quotient", "learn_quotient", "numbers_of", "quotient_of", "without_quotients"]

_FACTORS = (1, 100)
_MOST = 8  # numbers of one object; more are data
_ROUNDING = 1e-6
_LARGEST = 1e300  # larger whole numbers are no floating-point numbers
_MEANS = ("mean", "mean of rows")  # an average of all batches is a mean in the first batch

Numbers = Mapping[str, float]


def learn_quotient(table: MergeTable, path: str, runs: Sequence[Numbers]) -> bool:
    """Learn whether the number at `path` is a quotient in each run; return whether it is.

    Args:
        table: The rules, which hold each quotient that fits all checks.
        path: The place of the number.
        runs: The numbers that each run leaves at the paths that some run writes.
    """
    key = _key(path)
    known = table.all_rules(key) if table.knows(key) else frozenset(_candidates(path, runs[0]))
    fits = [rule for rule in known if _holds(rule, path, runs)]
    if fits:
        table.note(key, *fits)
    elif table.knows(key):
        table.reject(key)
    table.unmergeable.discard(key)
    return bool(fits)


def has_quotient(table: MergeTable, path: str) -> bool:
    """Return whether the number at `path` was a quotient in all checks."""
    return bool(table.all_rules(_key(path)))


def quotient_of(table: MergeTable, path: str, runs: Sequence[Numbers], merged: Callable[[str], Any], like: Any) -> Any:
    """Return the quotient of the merged numbers.

    Args:
        table: The rules.
        path: The place of the quotient.
        runs: The numbers that each micro-batch leaves, as in `learn_quotient`.
        merged: Returns the merged number at a path.
        like: A value of the type to return.

    Raises:
        SplitError: If the number is no such quotient in some micro-batch, or several quotients that fit differ.
    """
    rules = [rule for rule in table.all_rules(_key(path)) if _holds(rule, path, runs)]
    found = [_whole(rule, path, runs[0], merged) for rule in rules]
    if not found or not all(_is_near(one, found[0]) for one in found):
        raise refusal_of_merge(path)
    return torch.full_like(like, found[0]) if isinstance(like, Tensor) else found[0]


def _whole(rule: str, path: str, numbers: Numbers, merged: Callable[[str], Any]) -> float:
    factor, over, under = json.loads(rule)
    if over not in numbers:  # it stays, and so does the product
        return _ratio(numbers[path] * numbers[under], merged(under))
    if under not in numbers:
        return _ratio(numbers[path], numbers[over]) * float(merged(over))
    return factor * _ratio(merged(over), merged(under))


def _candidates(path: str, numbers: Numbers) -> Iterator[str]:
    """Yield a rule for each two numbers beside the one at `path`."""
    beside = [one for one in numbers if one != path and _owner(one) == _owner(path)]
    for over, under in permutations(beside if len(beside) < _MOST else (), 2):
        for factor in _FACTORS:
            yield json.dumps([factor, over, under])


def _holds(rule: str, path: str, runs: Sequence[Numbers]) -> bool:
    factor, over, under = json.loads(rule)
    if not {path, over} <= runs[0].keys() and not {path, under} <= runs[0].keys():
        return False
    if over not in runs[0]:
        found = [run[path] * run[under] for run in runs]
        return all(_is_near(one, found[0]) for one in found)
    if under not in runs[0]:
        found = [_ratio(run[path], run[over]) for run in runs]
        return all(_is_near(one, found[0]) for one in found)
    return all(_is_near(run[path], factor * _ratio(run[over], run[under])) for run in runs)


def _ratio(one: Any, other: Any) -> float:
    """Return the quotient of two numbers; NaN, which is near nothing, for a division by 0."""
    return float(one) / float(other) if float(other) else math.nan


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


def _owner(path: str) -> str:
    """Return the path of the object or dict that holds the number at `path`."""
    return path.rsplit("[" if path.endswith("]") else ".", 1)[0]


def _key(path: str) -> str:
    return f"{path} (quotient)"


def without_quotients(table: MergeTable, troubles: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Learn which numbers are quotients of others; return `troubles` without them."""
    left, numbers = list(troubles), numbers_of(runs)
    for path in numbers[0]:
        if path in troubles or has_quotient(table, path) or table.rule(path) in _MEANS:
            is_quotient = learn_quotient(table, path, numbers)
            if is_quotient and path in left:
                table.unmergeable.discard(path)
                left.remove(path)
    return left


def numbers_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the numbers that each run leaves at written paths, where all runs leave one."""
    written = {path: write for run in runs for path, write in run.items()}
    left = [{path: run[path].after if path in run else one.before for path, one in written.items()} for run in runs]
    paths = [path for path in written if all(_is_number(one[path]) for one in left)]
    return [{path: float(one[path]) for path in paths} for one in left]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
