"""Replace an attribute of a module or class for the duration of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside the block, and restore it afterwards.

    A name that the owner inherits, or lacks, is deleted again.
    """
    is_own, former = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, former)
        else:
            delattr(owner, name)
