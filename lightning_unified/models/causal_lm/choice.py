"""Build or load the language model that a module's arguments name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_unified.models.causal_lm.presets import Preset
from lightning_unified.models.causal_lm.weights import (
    DTYPES,
    adapt,
    build_language_model,
    find_language_model,
    load_language_model,
)
from lightning_unified.models.choices import check_choice
from lightning_unified.models.pretrained.architecture import read_architecture

__all__ = ["ADAPTER_ARGUMENTS", "language_model_of"]

ADAPTER_ARGUMENTS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
"""Names of a module's arguments about adapters."""


def language_model_of(hparams: Mapping[str, Any], presets: Mapping[str, Preset]) -> tuple[nn.Module, bool]:
    """Return the language model for the arguments of a module.

    Return also whether its weights were read from files. On the meta device none are read.

    Args:
        hparams: `preset`, `pretrained`, `architecture`, `load_pretrained`, `dtype`, `attention`, and those in `ADAPTER_ARGUMENTS`;
            `dora` if the module offers it.
        presets: The module's presets, by name.

    Raises:
        FileNotFoundError: If the weights are not found.
        ValueError: If a name is not offered.
    """
    check_choice("dtype", hparams["dtype"], DTYPES)
    check_choice("attention", hparams["attention"], ("sdpa", "eager"))
    check_choice("preset", hparams["preset"], presets)
    model, is_read = _built(hparams, presets[hparams["preset"]])
    if hparams["lora_rank"] is not None:
        given = {name.removeprefix("lora_"): hparams[name] for name in ADAPTER_ARGUMENTS}
        adapt(model, **given, dora=hparams.get("dora", False))
    return model, is_read


def _built(hparams: Mapping[str, Any], chosen: Preset) -> tuple[nn.Module, bool]:
    pretrained, architecture = hparams["pretrained"], hparams["architecture"]
    kept = {"dtype": hparams["dtype"], "attention": hparams["attention"]}
    source = pretrained or (chosen.pretrained if architecture is None else None)
    is_read = source is not None and hparams["load_pretrained"]
    if source is not None and is_read and not torch.empty(0).is_meta and architecture is None:
        return load_language_model(find_language_model(source), **kept), True
    if source not in (None, chosen.pretrained) and architecture is None:
        architecture = read_architecture(find_language_model(source))
    return build_language_model(architecture or chosen.architecture, **kept), is_read
