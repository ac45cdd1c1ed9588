"""Where a page is printed, and what is seen until it is."""

import os
import sys
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console

__all__ = ["page_console", "waiting"]

_PIPE_WIDTH = 140


def page_console() -> Console:
    """Return standard output; a file or a pipe, which has no width, gets one in which the tables have room."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=_PIPE_WIDTH)


def waiting(doing: str) -> AbstractContextManager[Any]:
    """Return a context in which a terminal shows what is done; standard output is left alone."""
    return Console(stderr=True).status(f"{doing} …")
