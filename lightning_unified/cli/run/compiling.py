"""What `hardware.compile=true` does: a run trains with its modules compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning import LightningModule

__all__ = ["compiled"]


@contextmanager
def compiled(module: LightningModule, *, wanted: bool) -> Iterator[None]:
    """Compile, meanwhile and in place, the modules that `module` consists of.

    Not `module` itself: its steps log, count and are called by a strategy, none of which a graph can hold. Not for
    longer than the training either: texts of every length would each be compiled for.
    """
    parts = list(module.children()) if wanted else []
    for part in parts:
        part.compile()
    try:
        yield
    finally:
        for part in parts:
            part._compiled_call_impl = None  # `Module.compile` has no opposite (torch 2.13)
