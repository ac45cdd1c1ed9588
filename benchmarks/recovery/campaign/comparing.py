"""Compare two runs: final states to the bit and to rounding, and each batch's record."""

import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["ROUNDING", "counts", "difference", "logs_differ", "other_state"]

ROUNDING = 1e-6  # relative; float64 sums in another order, through as many steps as these runs have, stay far below it
COUNTING = 1e-3  # relative; a row that counted twice or not at all is off by 1


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the relative distance of all weights; 0.0 only if every bit is equal."""
    if all(torch.equal(one[name], other[name]) for name in other):
        return 0.0
    a, b = (torch.cat([weights[name].double().flatten() for name in other]) for weights in (one, other))
    return max(float((a - b).norm() / b.norm()), sys.float_info.min)


def other_state(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return what of two final states differs in any bit, beside weights and logs."""
    names = ["buffers", "seen", "optimizer", "schedules", "scaler"]
    if one["trained"] and other["trained"]:  # a process that finds the run complete puts no random states back
        names += ["random", "python"]
    return [name for name in names if not _same(one[name], other[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def counts(ledger: dict[int, Any], expected: dict[int, Any]) -> tuple[int, int]:
    """Return how many rows counted too often and how many too rarely.

    The reference is a run without faults.
    """
    more = less = 0
    for number, line in expected.items():
        found = ledger.get(number, {}).get("counts") or [0.0] * len(line["counts"] or ())
        for mine, theirs in zip(found, line["counts"] or [0.0] * len(found), strict=True):
            margin = COUNTING * abs(theirs)
            more, less = more + (mine > theirs + margin), less + (mine < theirs - margin)
    return more, less


def logs_differ(
    final: dict[str, Any], twin: dict[str, Any], ledger: dict[int, Any], twins: dict[int, Any], *, whole: bool
) -> bool:
    """Return whether a batch's loss or a figure logged at the end differs.

    Means of a resumed epoch cover its remaining batches.
    """
    if any(line["loss"] != ledger[number]["loss"] for number, line in twins.items()):
        return True
    if not whole:
        return False
    mine, theirs = final["logged"], twin["logged"]
    if mine.keys() != theirs.keys():
        return True
    # a validation that ran in micro-batches adds up in another order, and a metric's float32 sum may differ in its last bit
    return any(abs(mine[name] - value) > ROUNDING * max(abs(value), 1.0) for name, value in theirs.items())
