"""The user's cache folder of this package: calibrations, converted models."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder"]

CACHE_VARIABLE = "LIGHTNING_UNIFIED_CACHE"
"""Environment variable that names the cache folder, in place of the platform's default."""


def cache_folder(environ: Mapping[str, str] = os.environ, *, system: str = sys.platform) -> Path | None:
    """Return this user's cache folder; None if the user has no home folder.

    `LIGHTNING_UNIFIED_CACHE` takes precedence over the platform's default: `$XDG_CACHE_HOME` or `~/.cache`, on macOS
    `~/Library/Caches`, on Windows `%LOCALAPPDATA%`.

    Source:
        XDG Base Directory Specification 0.8: relative paths are ignored.
    """
    if environ.get(CACHE_VARIABLE):
        return Path(environ[CACHE_VARIABLE])
    named = environ.get("LOCALAPPDATA" if system == "win32" else "XDG_CACHE_HOME", "")
    if Path(named).is_absolute() and system != "darwin":
        return Path(named) / "lightning_unified"
    usual = {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(system, ".cache")
    try:
        return Path.home() / usual / "lightning_unified"
    except RuntimeError:
        return None
