"""Checks of a data module's settings, made before any file is read."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["check_counts", "check_fractions", "check_one_of", "check_source", "check_switches"]

_DOCUMENT_PATHS = {"files": "a .jsonl or .txt file, or a folder of them"}


def check_counts(*, smallest: int = 1, optional: bool = False, **counts: Any) -> None:
    """Raise unless every count is a whole number of at least `smallest`, or None if `optional`."""
    for name, value in counts.items():
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            null = " or null" if optional else ""
            raise ValueError(f"data.{name}={value!r}; it must be a whole number of at least {smallest}{null}.")


def check_switches(**switches: Any) -> None:
    """Raise unless every switch is a bool."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"data.{name}={value!r}; it must be true or false.")  # noqa: TRY004 - an invalid setting, of any type


def check_fractions(**fractions: Any) -> None:
    """Raise unless every share is above 0 and at most 0.5."""
    for name, value in fractions.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 0.5:
            raise ValueError(f"data.{name}={value!r}; it must be above 0 and at most 0.5, as in 0.1.")


def check_one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raise unless `value` is one of `allowed`; the message names the nearest."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"data.{name}={value!r}; it must be one of {', '.join(allowed)}{hint}")


def check_source(
    source: Any, path: str | None, *, sources: Collection[str], paths: Mapping[str, str] = _DOCUMENT_PATHS
) -> None:
    """Raise for an unknown source, or a `path` that the source lacks or does not take.

    Args:
        source: The value of `data.source`.
        path: The value of `data.path`.
        sources: Allowed values of `source`.
        paths: For each source that reads `path`, a description of the path.
    """
    check_one_of("source", source, sources)
    if source in paths and not path:
        raise ValueError(f"data.source={source} needs data.path: {paths[source]}.")
    if source not in paths and path:
        raise ValueError(f"data.path={path} is given, but data.source={source} reads no path; set data.source=files.")
