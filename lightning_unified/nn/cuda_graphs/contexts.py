"""Contexts in which calls run eagerly, or in which nothing is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["are_eager", "eager_calls", "may_record", "no_new_recordings"]

_paused: ContextVar[bool] = ContextVar("paused", default=False)
_waits: ContextVar[bool] = ContextVar("waits", default=False)


def are_eager() -> bool:
    """Return whether this runs inside `eager_calls`."""
    return _paused.get()


def may_record() -> bool:
    """Return whether this runs outside of `no_new_recordings`."""
    return not _waits.get()


@contextmanager
def eager_calls() -> Iterator[None]:
    """Run all networks eagerly inside the context, without a log entry."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


@contextmanager
def no_new_recordings() -> Iterator[None]:
    """Make no recording inside the context, unless all gradients lie in the buffer.

    Recordings that exist are replayed. Enter it where gradients are set aside, so that `parameter.grad` does not show them. A recording would
    take a buffer beside them.
    """
    token = _waits.set(True)
    try:
        yield
    finally:
        _waits.reset(token)
