"""Build or load a sequence classifier of transformers.

Weights are in memory once, see `pretrained.streaming`. A file of another dtype is converted tensor by tensor.
"""

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from lightning_unified.models.pretrained.source import require
from lightning_unified.models.pretrained.streaming import check_complete, load_weights, without_values

__all__ = ["base_of", "build", "head_of", "load", "resize_head"]

_RENAMED = {".gamma": ".weight", ".beta": ".bias"}  # TensorFlow's names of layer norms, in files of the first BERTs
_DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout", "attention_dropout",
    "seq_classif_dropout", "embedding_dropout", "mlp_dropout", "hidden_dropout",
)  # fmt: skip


def build(
    architecture: Mapping[str, Any], *, labels: int, attention: str = "sdpa", dropout: float | None = None
) -> nn.Module:
    """Build a sequence classifier with random weights; on the meta device, without values.

    Args:
        architecture: A transformers configuration, with its `model_type`.
        labels: Number of labels.
        attention: transformers' name of the attention kernel.
        dropout: Dropout in place of all of the configuration's own.

    Raises:
        RuntimeError: If transformers is not installed.
        ValueError: If transformers does not know the architecture, or not with this attention.
    """
    require("transformers", "safetensors", need="the classifier needs", extras="classifier")
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = dict(architecture)
    kind = fields.pop("model_type", None)
    for name in ("num_labels", "id2label", "label2id", "dtype", "torch_dtype", "_name_or_path", "transformers_version"):
        fields.pop(name, None)
    try:
        config = AutoConfig.for_model(kind, **fields, num_labels=labels)
        if dropout is not None:
            _set_dropout(config, dropout)
        return AutoModelForSequenceClassification.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"transformers cannot build a sequence classifier with model_type={kind!r} and attention={attention!r} (eager is there for "
            f"all it knows): {shorten(str(error), 200)}"
        ) from error


def load(
    folder: Path,
    architecture: Mapping[str, Any],
    *,
    labels: int,
    attention: str = "sdpa",
    dropout: float | None = None,
) -> nn.Module:
    """Load a sequence classifier from `folder`; a missing head, or one of other labels, is new.

    Raises:
        FileNotFoundError: If the folder holds no safetensors.
        RuntimeError: If the encoder's weights are incomplete or have other sizes.
    """
    with without_values():
        model = build(architecture, labels=labels, attention=attention, dropout=dropout)
    prefix = f"{model.base_model_prefix}."
    missing = load_weights(
        model, folder, dtype=torch.float32, names_of=lambda stored: (_renamed(stored), prefix + _renamed(stored))
    )
    lacking = [name for name in missing if name.startswith(prefix) and ".pooler." not in f".{name}"]
    check_complete(lacking, model=model, folder=folder)
    _begin(model, missing)
    return model.train()


def base_of(model: nn.Module) -> nn.Module:
    """Return the encoder under the classification head."""
    return getattr(model, str(model.base_model_prefix))


def head_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not the encoder's."""
    own = {id(parameter) for parameter in base_of(model).parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in own]


def resize_head(model: Any, labels: int) -> None:
    """Replace the output layer of an untrained model by one for `labels` labels.

    Raises:
        RuntimeError: If its head has no linear output layer.
    """
    base = model.base_model_prefix
    linear = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not name.startswith(base)
        and module.out_features == model.config.num_labels
    ]
    if not linear:
        raise RuntimeError(f"the head of {type(model).__name__} has no linear output layer; set model.labels={labels}.")
    name, old = linear[-1]
    parent, _, own = name.rpartition(".")
    new = nn.Linear(
        old.in_features, labels, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
    )
    model._init_weights(new)
    setattr(model.get_submodule(parent), own, new)
    model.config.num_labels = model.num_labels = labels


def _set_dropout(config: Any, dropout: float) -> None:
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, dropout)


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _begin(model: Any, missing: set[str]) -> None:
    """Initialise the parameters that are in no file, as transformers does."""
    for path in sorted({name.rpartition(".")[0] for name in missing}):
        module = model.get_submodule(path)
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, own, nn.Parameter(torch.zeros(parameter.shape)))
        model._init_weights(module)
    model.tie_weights()
