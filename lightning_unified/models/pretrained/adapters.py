"""Low-rank adapters (LoRA): the product of two small matrices beside each frozen one.

DoRA also trains the length of each row of the sum. Sources: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
section 4.1; Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", section 4.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.models.pretrained.source import require

__all__ = ["adapt_linear_layers", "adapter_layers", "adapters_off"]


def adapt_linear_layers(
    network: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Sequence[str] | None,
    extra: str,
    dora: bool = False,
) -> None:
    """Freeze `network` and add adapters to its linear layers, in place.

    Under autocast, LoRA's adapters read a 16-bit input as it is. peft converts it to the adapters' float32, and autocast converts it back: the
    same numbers, but two more passes over the input, and a float32 copy that the backward pass keeps.

    Args:
        network: The network without its head, which stays unchanged.
        rank: Inner size of an adapter.
        alpha: The product of the two is multiplied by `alpha / rank`.
        dropout: Share dropped before an adapter.
        targets: Last names of the layers, as in "query"; None for all linear layers.
        extra: The extra of this package that installs peft.
        dora: Whether the adapters are DoRA.

    Raises:
        RuntimeError: If peft is not installed.
        ValueError: If no linear layer has one of the names.
    """
    require("peft", need="LoRA needs", extras=extra)
    from peft import LoraConfig, inject_adapter_in_model

    names = sorted({name.rpartition(".")[2] for name, layer in network.named_modules() if isinstance(layer, nn.Linear)})
    chosen = names if targets is None else list(targets)
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        raise ValueError(f"lora_targets={chosen}: the linear layers here are called {', '.join(names)}.")
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=chosen, use_dora=dora),  # pyright: ignore[reportArgumentType]
        network,
    )
    if not dora:  # DoRA computes the lengths of rows in the converted input's dtype
        for layer in adapter_layers(network):
            layer._cast_input_dtype = _converted_without_autocast


def _converted_without_autocast(source: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return an adapter's input in the adapter's dtype; unchanged under autocast.

    Autocast converts the input itself.
    """
    if source is None or source.dtype == dtype or torch.is_autocast_enabled(source.device.type):
        return source
    return source.to(dtype)


def adapter_layers(policy: nn.Module) -> list[Any]:
    """Return the layers of a model that have adapters."""
    if "peft" not in sys.modules:
        return []  # a model with adapters has imported peft already
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in policy.modules() if isinstance(layer, BaseTunerLayer)]


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Run a model without its adapters inside the context."""
    layers = adapter_layers(policy)
    trained = [value for value in policy.parameters() if value.requires_grad]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for value in policy.parameters():  # peft switches these with the adapters
            value.requires_grad_(False)
        for value in trained:
            value.requires_grad_(True)
