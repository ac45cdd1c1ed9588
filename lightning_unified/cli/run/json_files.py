"""What a run leaves behind as data: the summary, the plan and the versions, with null for whatever is not known."""

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
    """Return the versions of Python and of the packages that a result depends on; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`; what is not finite becomes null, which JSON has no other word for."""
    path.write_text(json.dumps(plain(content), indent=2) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: what is not finite becomes null, what is no plain value its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
