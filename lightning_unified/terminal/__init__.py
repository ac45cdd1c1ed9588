"""Output to a terminal, a pipe or a file: lasting streams, labelled lines, activities."""

from lightning_unified.terminal.activities import activity, is_first_process
from lightning_unified.terminal.lines import is_live, label, labelled, listed, say, short_path, wrapped
from lightning_unified.terminal.streams import lasting_output

__all__ = [
    "activity",
    "is_first_process",
    "is_live",
    "label",
    "labelled",
    "lasting_output",
    "listed",
    "say",
    "short_path",
    "wrapped",
]
