"""Low-rank adapters (LoRA) in an encoder: a frozen matrix and the product of two small ones beside it.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn

from lightning_unified.models.classifier.encoder import base_of, head_of

__all__ = ["adapt", "merged"]


def adapt(model: nn.Module, *, rank: int, alpha: float, dropout: float, targets: Sequence[str] | None) -> None:
    """Freeze the encoder and put adapters beside its linear layers; the head is trained as it is.

    Args:
        model: A sequence classifier of transformers, changed in place.
        rank: Inner size of an adapter.
        alpha: The product of the two is multiplied by `alpha / rank`.
        dropout: Share dropped before an adapter.
        targets: Last names of the layers, as in "query"; None for all linear layers of the encoder.

    Raises:
        RuntimeError: If peft is not installed.
        ValueError: If no layer is called so.
    """
    if find_spec("peft") is None:
        raise RuntimeError("LoRA needs peft, which is not installed; run: pip install 'lightning-unified[classifier]'")
    from peft import LoraConfig, inject_adapter_in_model

    head = head_of(model)
    base = base_of(model)
    names = sorted({name.rpartition(".")[2] for name, layer in base.named_modules() if isinstance(layer, nn.Linear)})
    chosen = names if targets is None else list(targets)
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        raise ValueError(f"lora_targets={chosen}: this encoder's linear layers are called {', '.join(names)}.")
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=chosen),  # pyright: ignore[reportArgumentType]
        base,
    )
    for parameter in head:
        parameter.requires_grad = True


def merged(model: Any) -> Any:
    """Put adapters into the matrices they are beside, in place, and return the model as transformers knows it."""
    if find_spec("peft") is None:
        return model
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer.get_base_layer())
    return model
