"""Suggest the valid name nearest to an invalid one."""

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the member of `valid` most similar to `name`; None if none is similar enough.

    The last part of dotted names is compared too, so `max_steps` finds `trainer.max_steps`.
    """
    names = list(valid)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if found:
        return found[0]
    last = name.rpartition(".")[2]
    by_last = {candidate.rpartition(".")[2]: candidate for candidate in reversed(names)}
    found = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.75)
    if found:
        return by_last[found[0]]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return `"; did you mean X?"` for the nearest valid name, or `"."` without one."""
    found = nearest(name, valid)
    return f"; did you mean {found}?" if found else "."
