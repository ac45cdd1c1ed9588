"""Guess the number of rows of a first batch, from its loader and its entries."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_unified.step.split.containers import is_sequence, tensors_in
from lightning_unified.step.split.roles import Place, Trial, tried
from lightning_unified.step.split.samples import LoaderSamples

__all__ = ["assumed", "guessed_rows"]


def assumed(
    places: Sequence[Place], path: str, samples: LoaderSamples, rows: int, *, shared: Sequence[str], is_known: bool
) -> Trial:
    """Return the roles of `places` if the sub-batch at `path` has `rows` rows.

    The loader's constants count as shared entries, unless no entry would have rows then.
    """
    for known in (samples, replace(samples, constants=())):
        trial = tried(places, rows, root=path, shared=shared, samples=known, is_known=is_known)
        if trial.has_rows or not samples.constants:
            break
    return trial


def guessed_rows(
    places: Sequence[Place], path: str, samples: LoaderSamples, *, shared: Sequence[str], is_prepared: bool
) -> int | None:
    """Return the number of rows of a first batch; None if it is unknown.

    Args:
        places: The places without roles.
        path: The path of the sub-batch.
        samples: The samples in a batch of its loader.
        shared: Paths that the user has declared as shared.
        is_prepared: Whether the rule `prepare` makes the batches, so that their rows may differ from the loader's.
    """
    if is_prepared or not samples.counts:
        found = _unanimous(places, path, samples, shared)
        if found is not None:
            return found
    for rows in samples.counts:
        if assumed(places, path, samples, rows, shared=shared, is_known=True).has_rows:
            return rows
    return _unanimous(places, path, samples, shared)


def _unanimous(places: Sequence[Place], path: str, samples: LoaderSamples, shared: Sequence[str]) -> int | None:
    """Return the only number of rows that leaves no leaf over; None if none or several do.

    No leaf is left over if each is split, is a constant of the loader, or has at most one entry in dimension 0.
    """
    lists = [place for place in places if place.tag == "list"]
    leaves = {place.size for place in places if place.tag == "leaf"}
    leaves |= {tensor.size(0) for one in lists for tensor in tensors_in(one.value) if tensor.dim()}
    if lists and lists[0].path == path and samples.collates == "rows":
        return lists[0].size
    if lists and lists[0].path == path and samples.collates is None and _is_row_of_tensors(lists[0].value):
        return None
    for candidates in (leaves, _lengths(lists)):
        fitting = []
        for rows in sorted(n for n in candidates if n):
            trial = assumed(places, path, samples, rows, shared=shared, is_known=False)
            if trial.has_rows and not trial.left_over:
                fitting.append(rows)
        larger = [rows for rows in fitting if rows > 1] or fitting
        if larger:
            return larger[0] if len(larger) == 1 else None
    return None


def _is_row_of_tensors(value: Sequence[Any]) -> bool:
    """Return whether a batch is a list of three or more similar tensors.

    Such tensors may be rows or columns.
    """
    sorts = {(one.dtype, one.dim()) if isinstance(one, Tensor) and one.dim() else None for one in value}
    return len(value) > 2 and len(sorts) == 1 and None not in sorts


def _lengths(lists: Sequence[Place]) -> set[int | None]:
    """Return the lengths of lists and of the lists inside them."""
    inner = {len(entry) for place in lists for entry in place.value if is_sequence(entry)}
    return {place.size for place in lists} | inner
