"""Check the settings of a data module before any file is read."""

import difflib
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_unified.data.sources.corpora import SOURCES
from lightning_unified.data.tokenizer import SMALLEST_VOCABULARY

__all__ = ["check"]

_SMALLEST = {
    "batch_size": 1,
    "sequence_length": 8,
    "text_length": 8,
    "continuation_length": 0,
    "vocab_size": SMALLEST_VOCABULARY,
    "seed": 0,
    "num_workers": 0,
    "val_batch_size": 1,
    "prefetch_factor": 1,
    "max_groups": 2,
}
_OPTIONAL = {"val_batch_size", "prefetch_factor", "max_groups"}
_DOCUMENT_PATHS = {"files": "a .jsonl or .txt file, or a folder of them"}
_SWITCHES = ("persistent_workers", "pin_memory", "drop_last")


def check(
    settings: dict[str, Any], *, sources: Sequence[str] = SOURCES, paths: Mapping[str, str] = _DOCUMENT_PATHS
) -> None:
    """Raise for invalid settings of a data module.

    Args:
        settings: The data module's arguments by name.
        sources: Allowed values of `source`.
        paths: For each source that reads `path`, a description of the path.

    Raises:
        ValueError: With the setting, the given value and the allowed ones.
    """
    for name, smallest in _SMALLEST.items():
        if name not in settings:
            continue
        value = settings[name]
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            null = " or null" if name in _OPTIONAL else ""
            raise ValueError(f"data.{name}={value!r}; it must be a whole number of at least {smallest}{null}.")
    for name in _SWITCHES:
        if not isinstance(settings[name], bool):
            raise ValueError(f"data.{name}={settings[name]!r}; it must be true or false.")  # noqa: TRY004 - an invalid setting, of any type
    _one_of("source", settings["source"], sources)
    if "loss_on" in settings:
        _one_of("loss_on", settings["loss_on"], ("all", "answer"))
    if settings["start_method"] is not None:
        _one_of("start_method", settings["start_method"], multiprocessing.get_all_start_methods())
    _fraction("val_fraction", settings["val_fraction"])
    if settings.get("test_fraction"):
        _fraction("test_fraction", settings["test_fraction"])
    source, path = settings["source"], settings["path"]
    if source in paths and not path:
        raise ValueError(f"data.source={source} needs data.path: {paths[source]}.")
    if source not in paths and path:
        raise ValueError(f"data.path={path} is given, but data.source={source} reads no path; set data.source=files.")


def _fraction(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 0.5:
        raise ValueError(f"data.{name}={value!r}; it must be above 0 and at most 0.5, as in 0.1.")


def _one_of(name: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"data.{name}={value!r}; it must be one of {', '.join(allowed)}{hint}")
