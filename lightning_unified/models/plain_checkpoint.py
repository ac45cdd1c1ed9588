"""Read checkpoints as plain data, without running code from the file."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["read_plain", "read_trained"]


def read_plain(path: str | Path) -> Any:
    """Read a checkpoint to the CPU as plain data (`weights_only=True`).

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
    except Exception as error:  # an unpickler may raise any exception on arbitrary bytes
        # torch's text stays in the chained error: it advises loading the file as code, which does not help with a damaged file
        raise RuntimeError(
            f"{path} cannot be read as a checkpoint: it is damaged, incomplete, or holds more than plain data; use another."
        ) from error


def read_trained(path: str | Path, *, model: str, untrained: str) -> dict[str, Any]:
    """Read a trained model's checkpoint as plain data, and check which model it belongs to.

    Args:
        path: The `.ckpt` file.
        model: Key of the model's own part of the checkpoint, as in `"compressor"`.
        untrained: What an untrained model would do, for the message.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: If it is damaged, belongs to another model, or was saved before the first training step.
    """
    saved = read_plain(path)
    needed = ("state_dict", "hyper_parameters", model, "global_step")
    missing = [name for name in needed if not isinstance(saved, dict) or name not in saved]
    if missing:
        raise RuntimeError(f"{path} is not a checkpoint of a {model}: {', '.join(missing)} missing.")
    if not saved["global_step"] > 0:
        raise RuntimeError(f"{path} was saved before the first step of training: {untrained}. Give a later one.")
    return saved
