"""Read YAML and JSON of a run directory within limits, and text that is safe to print.

A few bytes of YAML with aliases can stand for gigabytes, and deep nesting ends a parser. So size, depth and aliases are limited.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lightning_unified.errors import ConfigurationError

__all__ = ["printable", "read_json", "read_text", "read_yaml"]

_LARGEST_YAML, _LARGEST_TEXT, _LARGEST_JSON = (
    1 << 20,
    1 << 20,
    64 << 20,
)  # bytes; configurations and samples have some kilobytes
_DEEPEST = 64  # levels of nesting
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline: C0, DEL and C1


def read_yaml(path: Path) -> Any:
    """Return the OmegaConf configuration in `path`.

    Raises:
        ConfigurationError: If the file is larger than 1 MiB, nests more than 64 levels, has aliases, or is no YAML.
    """
    text = _text(path, _LARGEST_YAML)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigurationError(f"{path}: it has the YAML alias *{event.anchor}; write the value out.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ConfigurationError(f"{path}: it nests more than {_DEEPEST} levels.")
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"{path}: it is no YAML ({printable(str(error).splitlines()[0])}).") from error
    return OmegaConf.create(text)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, its texts made `printable`.

    Raises:
        ConfigurationError: If the file is larger than 64 MiB, nests too deep, or is no JSON.
    """
    try:
        return _printable_all(json.loads(_text(path, _LARGEST_JSON)))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: it is no JSON, or nests too deep ({error}).") from error


def read_text(path: Path) -> str:
    """Return the content of a text file, made `printable`.

    Raises:
        ConfigurationError: If the file is larger than 1 MiB.
    """
    return printable(_text(path, _LARGEST_TEXT))


def printable(text: str) -> str:
    """Return `text` with every character that controls a terminal replaced.

    Tabs and newlines stay.
    """
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _text(path: Path, largest: int) -> str:
    size = path.stat().st_size
    if size > largest:
        raise ConfigurationError(f"{path}: it has {size} bytes, and at most {largest} are read.")
    return path.read_text(encoding="utf-8", errors="replace")


def _printable_all(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _printable_all(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_printable_all(member) for member in value]
    return printable(value) if isinstance(value, str) else value
