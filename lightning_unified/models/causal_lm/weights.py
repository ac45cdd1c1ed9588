"""Build or load a causal language model of transformers, with or without adapters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from lightning_unified.models.choices import check_choice
from lightning_unified.models.pretrained.adapters import adapt_linear_layers
from lightning_unified.models.pretrained.architecture import read_architecture
from lightning_unified.models.pretrained.gguf import GGUF_PACKAGES, converted
from lightning_unified.models.pretrained.source import find_model, require
from lightning_unified.models.pretrained.streaming import check_complete, load_weights, without_values

__all__ = ["DTYPES", "adapt", "build_language_model", "find_language_model", "load_language_model"]

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes in which the model's own weights may be kept."""

_OF_FILES = ("dtype", "torch_dtype", "_name_or_path", "transformers_version", "architectures", "quantization_config")


def find_language_model(source: str) -> Path:
    """Return the folder with a model's `config.json`, `*.safetensors` and tokenizer.

    Args:
        source: A key of `gguf.GGUF_PACKAGES`, which is converted once and kept; a folder; an installed package; or a hub id.

    Raises:
        FileNotFoundError: If `source` is none of these, or cannot be downloaded.
        RuntimeError: If a library is missing.
    """
    if source in GGUF_PACKAGES:
        return converted(source)
    return find_model(source, argument="pretrained")


def build_language_model(
    architecture: Mapping[str, Any], *, dtype: str = "float32", attention: str = "sdpa"
) -> nn.Module:
    """Build a causal language model with random weights; on the meta device, without values.

    Args:
        architecture: A transformers configuration as plain data, with its `model_type`.
        dtype: Dtype of the weights, a key of `DTYPES`.
        attention: transformers' name of the attention kernel.

    Raises:
        RuntimeError: If transformers is not installed.
        ValueError: If the dtype is not offered, or transformers knows no such architecture or attention.
    """
    check_choice("dtype", dtype, DTYPES)
    require("transformers", need="a language model needs", extras="pretrained")
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in architecture.items() if name not in _OF_FILES}
    kind = fields.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **fields)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=DTYPES[dtype])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"transformers cannot build a causal language model with model_type={kind!r} and attention={attention!r} (eager is there "
            f"for all it knows): {shorten(str(error), 200)}"
        ) from error
    return model.train()


def load_language_model(folder: Path, *, dtype: str = "float32", attention: str = "sdpa") -> nn.Module:
    """Load the causal language model in `folder`, with one copy of the weights in memory.

    See `pretrained.streaming`. Weights stored in another dtype are converted tensor by tensor. See `build_language_model` for the arguments.

    Raises:
        FileNotFoundError: If the folder holds no safetensors.
        RuntimeError: If the weights do not fit `config.json` or are incomplete, or transformers is missing.
        ValueError: As `build_language_model`.
    """
    with without_values():
        model = build_language_model(read_architecture(folder), dtype=dtype, attention=attention)
    load_weights(model, folder, dtype=DTYPES[dtype])
    model.tie_weights()  # pyright: ignore[reportCallIssue]
    lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    check_complete(lacking, model=model, folder=folder)
    return model


def adapt(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: Sequence[str] | None = None,
    dora: bool = False,
) -> None:
    """Freeze a causal language model, and add adapters to all linear layers but the head.

    Adapters are float32 for any dtype of the weights: 16 bits would lose a step of 1e-6. See
    `pretrained.adapters.adapt_linear_layers` for the arguments and errors.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
    adapt_linear_layers(
        model.get_submodule(str(model.base_model_prefix)),
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        targets=targets,
        dora=dora,
        extra="pretrained",
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
