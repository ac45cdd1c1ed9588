"""Checkpoints of the models that are used outside training, read as plain data."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["read_plain"]


def read_plain(path: str | Path) -> Any:
    """Return what a checkpoint holds, on the CPU, as plain data (`weights_only=True`): a file cannot run code here.

    Args:
        path: The `.ckpt` file.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: If it is damaged, or holds more than plain data.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no checkpoint {path}; give the path of a .ckpt file that training has saved."
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # an unpickler that is fed arbitrary bytes may raise anything
        # torch's own text is left to the chained error: it advises to load the file as code, which a damaged file is no reason for.
        raise RuntimeError(
            f"{path} cannot be read as a checkpoint: it is damaged, incomplete, or holds more than plain data; use another."
        ) from error
