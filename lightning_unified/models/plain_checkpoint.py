"""Read checkpoints as plain data, without running code from the file.

The checks refuse a checkpoint whose sizes, weights or tokenizer are not those of the model.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lightning_unified.files.mapped import giving_back, load_mapped, owned

__all__ = ["check_same_sizes", "check_vocabulary", "load_weights", "read_plain", "read_trained"]


def read_plain(path: str | Path) -> Any:
    """Map a checkpoint as plain data (`weights_only=True`).

    Its tensors are views of the file; `load_weights` moves their values. Those of a distributed checkpoint, which is a folder, are read
    whole, without the states of optimizers.

    Raises:
        FileNotFoundError: If there is no such file or folder.
        RuntimeError: If it is damaged, or holds more than plain data.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no checkpoint {path}; give the path of a .ckpt file that training has saved."
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            if path.is_dir():
                from lightning_unified.files.sharded_folder import read_folder

                return read_folder(path, with_optimizers=False)
            return load_mapped(path, weights_only=True)
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
        untrained: The behaviour of an untrained model, for the message.

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


def load_weights(module: nn.Module, weights: Mapping[str, Any], *, path: str | Path, assign: bool = False) -> None:
    """Load the weights of the checkpoint `path`, and release its pages as the values move.

    `assign` is that of `load_state_dict`: the values become the parameters of a module that has none.

    Raises:
        RuntimeError: If they do not fit the module's sizes.
    """
    try:
        with giving_back():
            if assign:
                weights = {name: owned(value) for name, value in weights.items()}
            module.load_state_dict(weights, assign=assign)
    except RuntimeError as error:
        raise RuntimeError(f"{path}: weights and sizes do not belong together; the file was altered.") from error


def check_same_sizes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a ValueError if the sizes in a checkpoint differ from the model's own.

    Dropout may differ.

    Args:
        saved: A configuration as plain data, possibly nested.
        own: That of the model.
    """
    if other := _differences(saved, own):
        raise ValueError(f"the checkpoint has other sizes: {', '.join(other)}. Build the model with the checkpoint's.")


def check_vocabulary(given: Mapping[str, int], *, rows: int, trained: Mapping[str, int] | None) -> None:
    """Raise a ValueError if a tokenizer has too many tokens or others than in training.

    Args:
        given: The tokenizer's tokens with their ids.
        rows: Rows of the model's token table.
        trained: The tokens of the model's training; None before training.
    """
    if len(given) > rows:
        raise ValueError(
            f"the tokenizer has {len(given):,} tokens, the model's vocabulary is {rows:,}; train the tokenizer with at most "
            f"{rows:,} or set the model's vocabulary={len(given)}."
        )
    if trained is not None and trained != given:
        raise ValueError(
            f"this model was trained with another tokenizer ({len(trained):,} tokens) than the one given ({len(given):,} tokens); "
            "its weights mean nothing under the new one. Use the tokenizer of the checkpoint."
        )


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in own.items():
        if isinstance(value, Mapping):
            found += _differences(saved.get(key, {}), value)
        elif key != "dropout" and saved.get(key) != value:
            found.append(f"{key} {saved.get(key)} (here {value})")
    return found
