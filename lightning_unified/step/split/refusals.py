"""The errors that say why a batch cannot be split by rows."""

from collections.abc import Sequence
from typing import Any

from lightning_unified.errors import SplitError
from lightning_unified.step.split.roles import Place

__all__ = ["MOST_NAMED", "ambiguity", "contradiction", "unknown_class", "unsplittable", "without_rows"]

MOST_NAMED = 8  # entries in a message
_WAYS_OUT = "give rows=RowRules(split=…, count=…) in MicroBatchRules, or splittable=False to run batches whole"


def contradiction(name: str, places: Sequence[Place], *, suspect: Place, is_late: bool) -> SplitError:
    """Return the error for entries that are split by rows and differ in their number of rows.

    Args:
        name: The name of the module's class.
        places: All entries that are split by rows.
        suspect: The entry that may have no row dimension.
        is_late: Whether earlier batches were split along that entry.
    """
    late = "; earlier batches were split along it" if is_late else ""
    return SplitError(
        f"a batch of {name} cannot be split: entries that are split by rows differ in their first dimension "
        f"({_listed(places)}){late}. If {suspect.path!r} has no row dimension, give MicroBatchRules(rows=RowRules(shared="
        f"({suspect.path!r},))); for sub-batches of several loaders, give these the same batch_size and drop_last=True; else {_WAYS_OUT}."
    )


def ambiguity(name: str, places: Sequence[Place]) -> SplitError:
    """Return the error for a batch whose rows are ambiguous."""
    return SplitError(
        f"the rows of a batch of {name} are ambiguous: {_listed(places)}. In MicroBatchRules, give "
        "rows=RowRules(count=…, shared=(…)), a function that returns the number of rows and the paths of entries without a row "
        f"dimension; else {_WAYS_OUT}."
    )


def unknown_class(name: str, place: Place) -> SplitError:
    """Return the error for an object of an unknown class that may hold one entry per row."""
    where, shared = "a batch", ""
    if place.path:
        where = f"the entry {place.path!r} of a batch"
        shared = f"give rows=RowRules(shared=({place.path!r},)) if every micro-batch may get it whole; else "
    kind = type(place.value).__name__
    return SplitError(f"{where} of {name} is of type {kind}, whose rows cannot be inferred; {shared}{_WAYS_OUT}.")


def unsplittable(name: str, why: str) -> SplitError:
    """Return the error for an entry whose kind cannot be split."""
    return SplitError(f"{name}: {why}; {_WAYS_OUT}.")


def without_rows(name: str, batch: Any) -> SplitError:
    """Return the error for a batch without an entry that has rows."""
    return SplitError(
        f"a batch of {name}, of type {type(batch).__name__}, has no entry with a row dimension, so it cannot be split; {_WAYS_OUT}."
    )


def _listed(places: Sequence[Place]) -> str:
    """Return the paths and sizes of the first places, for a message."""
    sized = [place for place in places if place.size is not None]
    named = [f"{place.path or 'the list'} has {place.size}" for place in sized[:MOST_NAMED]]
    return ", ".join(named) + (f", and {len(sized) - MOST_NAMED} more" if len(sized) > MOST_NAMED else "")
