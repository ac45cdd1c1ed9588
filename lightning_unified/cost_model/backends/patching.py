"""A module's or class's attribute replaced for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` and, at the end, to what it was."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)
