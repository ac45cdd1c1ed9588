"""The architecture of a transformers model: its configuration as plain data, and its blocks."""

import json
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["architecture_of", "blocks_of", "read_architecture"]


def read_architecture(folder: Path) -> dict[str, Any]:
    """Return the configuration in a folder as plain data."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def architecture_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's configuration as plain data, to build it again."""
    return json.loads(json.dumps(model.config.to_diff_dict(), default=str))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks in running order: its longest list of modules of one class."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [list(blocks) for blocks in lists if len({type(block) for block in blocks}) == 1]
    return max(alike, key=len, default=[])
