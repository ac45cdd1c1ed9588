"""Build or load Wordle's language model, and name its frozen weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_unified.models.choices import check_choice
from lightning_unified.models.grpo.policy import (
    DTYPES,
    adapt,
    build_policy,
    find_policy,
    load_policy,
)
from lightning_unified.models.pretrained.architecture import read_architecture
from lightning_unified.models.wordle.presets import preset

__all__ = ["frozen_names", "policy_of"]


def policy_of(hparams: Mapping[str, Any]) -> tuple[nn.Module, bool]:
    """Return the language model for the arguments of `Wordle`.

    Return also whether its weights were read from files.

    Raises:
        FileNotFoundError: If the weights are not found.
        ValueError: If a name is not offered.
    """
    check_choice("dtype", hparams["dtype"], DTYPES)
    check_choice("attention", hparams["attention"], ("sdpa", "eager"))
    model, is_read = _built(hparams)
    if hparams["lora_rank"] is not None:
        adapt(model, **{name: hparams[f"lora_{name}"] for name in ("rank", "alpha", "dropout", "targets")})
    return model, is_read


def _built(hparams: Mapping[str, Any]) -> tuple[nn.Module, bool]:
    chosen, pretrained, architecture = preset(hparams["preset"]), hparams["pretrained"], hparams["architecture"]
    kept = {"dtype": hparams["dtype"], "attention": hparams["attention"]}
    source = pretrained or (chosen.pretrained if architecture is None else None)
    is_read = source is not None and hparams["load_pretrained"]
    if source is not None and is_read and not torch.empty(0).is_meta and architecture is None:
        return load_policy(find_policy(source), **kept), True
    if pretrained is not None and architecture is None:
        architecture = read_architecture(find_policy(pretrained))
    return build_policy(architecture or chosen.architecture, **kept), is_read


def frozen_names(policy: nn.Module) -> list[str]:
    """Return the names in a module's state dict of the tensors of its `policy` that are not trained."""
    trained = {id(one) for one in policy.parameters() if one.requires_grad}
    held = policy.state_dict(prefix="policy.", keep_vars=True)
    return [name for name, value in held.items() if id(value) not in trained]
