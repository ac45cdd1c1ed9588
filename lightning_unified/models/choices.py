"""What a user chooses by name for any of the models: refused with the nearest name, or looked up."""

import difflib
from collections.abc import Collection

import torch

__all__ = ["check_choice", "inference_device"]


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse a value that is not among the choices.

    Raises:
        ValueError: Names the argument, the nearest choice and all of them.
    """
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}={value!r} is not offered;{hint} choose from {', '.join(choices)}.")


def inference_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the accelerator that is here, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
