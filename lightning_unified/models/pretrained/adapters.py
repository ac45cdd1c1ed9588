"""Low-rank adapters (LoRA): the product of two small matrices beside each frozen one.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

from collections.abc import Sequence

from torch import nn

from lightning_unified.models.pretrained.source import require

__all__ = ["adapt_linear_layers"]


def adapt_linear_layers(
    network: nn.Module, *, rank: int, alpha: float, dropout: float, targets: Sequence[str] | None, extra: str
) -> None:
    """Freeze `network` and add adapters to its linear layers, in place.

    Args:
        network: The network without its head, which stays unchanged.
        rank: Inner size of an adapter.
        alpha: The product of the two is multiplied by `alpha / rank`.
        dropout: Share dropped before an adapter.
        targets: Last names of the layers, as in "query"; None for all linear layers.
        extra: The extra of this package that installs peft.

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
        LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=chosen),  # pyright: ignore[reportArgumentType]
        network,
    )
