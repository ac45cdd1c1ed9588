"""JSON files of a run directory: plain values, null for unknown ones, package versions."""

import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["plain", "versions", "write_json"]

_PACKAGES = ("lightning-unified", "torch", "lightning", "hydra-core", "numpy")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect a result.

    A package that is not installed has None.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` as JSON, with null for values that are not finite."""
    path.write_text(json.dumps(plain(content), indent=2) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Return `value` in JSON types: numbers that are not finite as None, other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
