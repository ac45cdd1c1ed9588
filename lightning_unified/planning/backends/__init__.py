"""What a backend does differently from the CPU that a step is rehearsed on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_unified.planning.trace import Trace

__all__ = ["Hidden", "hidden_bytes", "mimic", "with_workspaces"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """Bytes of an operation that no tensor shows."""

    temporary: int = 0
    saved: int = 0


@contextmanager
def mimic(_backend: str) -> Iterator[None]:
    """Nothing differs."""
    yield


def hidden_bytes(_func: Any, _args: Any, _kwargs: Mapping[str, Any], _result: Any, *, backend: str) -> Hidden:  # noqa: ARG001
    """Nothing is hidden."""
    return Hidden()


def with_workspaces(trace: Trace) -> Trace:
    """Nothing is added."""
    return trace
