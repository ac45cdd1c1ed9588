"""The user's cache and state folders of this package."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "STATE_VARIABLE", "cache_folder", "runs_folder"]

CACHE_VARIABLE = "LIGHTNING_UNIFIED_CACHE"
"""Environment variable that names the cache folder, in place of the platform's default."""

STATE_VARIABLE = "LIGHTNING_UNIFIED_STATE_DIR"
"""Environment variable that names the state folder, in place of the platform's default."""


def cache_folder(environ: Mapping[str, str] = os.environ, *, system: str = sys.platform) -> Path | None:
    """Return the user's folder of calibrations and converted models; None without a home folder.

    `LIGHTNING_UNIFIED_CACHE` takes precedence over the platform's default: `$XDG_CACHE_HOME` or `~/.cache`, on macOS
    `~/Library/Caches`, on Windows `%LOCALAPPDATA%`.
    """
    if environ.get(CACHE_VARIABLE):
        return Path(environ[CACHE_VARIABLE])
    return _own_folder(environ, system, variable="XDG_CACHE_HOME", on_linux=".cache", on_macos="Library/Caches")


def runs_folder(environ: Mapping[str, str] = os.environ, *, system: str = sys.platform) -> Path | None:
    """Return the user's folder of records of live runs; None without a home folder.

    It lies in `LIGHTNING_UNIFIED_STATE_DIR`, or in the platform's default: `$XDG_STATE_HOME` or `~/.local/state`, on macOS
    `~/Library/Application Support`, on Windows `%LOCALAPPDATA%`.
    """
    if environ.get(STATE_VARIABLE):
        return Path(environ[STATE_VARIABLE]) / "runs"
    usual = {"on_linux": ".local/state", "on_macos": "Library/Application Support"}
    folder = _own_folder(environ, system, variable="XDG_STATE_HOME", **usual)
    return None if folder is None else folder / "runs"


def _own_folder(environ: Mapping[str, str], system: str, *, variable: str, on_linux: str, on_macos: str) -> Path | None:
    """Return this package's folder below that of `variable`, or below the platform's default.

    Source:
        XDG Base Directory Specification 0.8: relative paths are ignored.
    """
    named = environ.get("LOCALAPPDATA" if system == "win32" else variable, "")
    if Path(named).is_absolute() and system != "darwin":
        return Path(named) / "lightning_unified"
    usual = {"darwin": on_macos, "win32": "AppData/Local"}.get(system, on_linux)
    try:
        return Path.home() / usual / "lightning_unified"
    except RuntimeError:
        return None
