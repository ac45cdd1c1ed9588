"""Checkpoints of the models that are used outside training, read as plain data."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["read_plain", "read_trained"]


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


def read_trained(path: str | Path, *, model: str, untrained: str) -> dict[str, Any]:
    """Return a checkpoint of one kind of model that training has saved, as `read_plain` does.

    Args:
        path: The `.ckpt` file.
        model: What it is of, as the model names its own part of it: `"compressor"`.
        untrained: What it would do if it had not been trained, for the message.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: If it is damaged, is of another kind, or was saved before the first step of training.
    """
    saved = read_plain(path)
    needed = ("state_dict", "hyper_parameters", model, "global_step")
    missing = [name for name in needed if not isinstance(saved, dict) or name not in saved]
    if missing:
        raise RuntimeError(f"{path} is not a checkpoint of a {model}: {', '.join(missing)} missing.")
    if not saved["global_step"] > 0:
        raise RuntimeError(f"{path} was saved before the first step of training: {untrained}. Give a later one.")
    return saved
