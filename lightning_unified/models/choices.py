"""Check arguments that a user gives to a model, and resolve the device."""

import difflib
from collections.abc import Collection, Mapping

import torch

__all__ = ["check_choice", "check_numbers", "inference_device"]


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise if a value is not among the choices.

    Raises:
        ValueError: With the argument, the nearest choice and all choices.
    """
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}={value!r} is not offered;{hint} choose from {', '.join(choices)}.")


def check_numbers(*, positive: Mapping[str, float], not_negative: Mapping[str, float]) -> None:
    """Raise a ValueError that names the first argument out of range."""
    for name, value in positive.items():
        if value <= 0:
            raise ValueError(f"{name}={value} must be above 0.")
    for name, value in not_negative.items():
        if value < 0:
            raise ValueError(f"{name}={value} may not be below 0.")


def inference_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the available accelerator, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
