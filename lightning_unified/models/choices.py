"""Check arguments that a user chooses by name, and resolve the device."""

import difflib
from collections.abc import Collection

import torch

__all__ = ["check_choice", "inference_device"]


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise if a value is not among the choices.

    Raises:
        ValueError: With the argument, the nearest choice and all choices.
    """
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}={value!r} is not offered;{hint} choose from {', '.join(choices)}.")


def inference_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the available accelerator, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
