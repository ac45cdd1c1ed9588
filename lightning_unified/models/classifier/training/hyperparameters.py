"""Checks of the classifier's hyperparameters, made before anything is built."""

from collections.abc import Mapping
from typing import Any

from lightning_unified.models.choices import check_choice
from lightning_unified.models.training import check_optimizer_choices

__all__ = ["check_hyperparameters"]

_POSITIVE = ("learning_rate", "eps", "lora_alpha")
_SHARES = ("label_smoothing", "warmup_share", "lora_dropout", "dropout")
_LEAST = {"weight_decay": 0, "calibration_bins": 1, "labels": 2, "lora_rank": 1}


def check_hyperparameters(given: Mapping[str, Any]) -> None:
    """Check the arguments of `TextClassifier` by name.

    None stands for an argument that is not set.

    Raises:
        ValueError: For the first name that is not offered, or number that is out of range.
    """
    check_optimizer_choices(schedule=given["schedule"], optimizer_kernel=given["optimizer_kernel"])
    check_choice("attention", given["attention"], ("sdpa", "eager"))
    if isinstance(given["class_weights"], str):
        check_choice("class_weights", given["class_weights"], ("none", "balanced"))
    for name, least in _LEAST.items():
        if given[name] is not None and given[name] < least:
            raise ValueError(f"{name}={given[name]}; give {least} or more.")
    for name in _POSITIVE:
        if given[name] <= 0:
            raise ValueError(f"{name}={given[name]} must be above 0.")
    for name in _SHARES:
        if given[name] is not None and not 0 <= given[name] < 1:
            raise ValueError(f"{name}={given[name]} is not a share; give 0 up to, but not including, 1.")
