"""Low-rank adapters in an encoder with a trained head, and their merge."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn

from lightning_unified.models.classifier.network.encoder import base_of, head_of
from lightning_unified.models.pretrained.adapters import adapt_linear_layers

__all__ = ["adapt", "merged"]


def adapt(model: nn.Module, *, rank: int, alpha: float, dropout: float, targets: Sequence[str] | None) -> None:
    """Freeze the encoder and add adapters to its linear layers; the head is trained in full.

    Args:
        model: A sequence classifier of transformers, changed in place.
        rank: Inner size of an adapter.
        alpha: The product of the two is multiplied by `alpha / rank`.
        dropout: Share dropped before an adapter.
        targets: Last names of the layers, as in "query"; None for all linear layers of the encoder.

    Raises:
        RuntimeError: If peft is not installed.
        ValueError: If no linear layer has one of the names.
    """
    head = head_of(model)
    adapt_linear_layers(base_of(model), rank=rank, alpha=alpha, dropout=dropout, targets=targets, extra="classifier")
    for parameter in head:
        parameter.requires_grad = True


def merged(model: Any) -> Any:
    """Merge adapters into their matrices in place, and return the model as transformers has it."""
    if find_spec("peft") is None:
        return model
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer.get_base_layer())
    return model
