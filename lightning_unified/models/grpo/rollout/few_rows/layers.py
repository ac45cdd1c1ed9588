"""Linear layers and LoRA layers of a decode step, computed by `products`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.models.grpo.rollout.few_rows.operators import MOST_ROWS, add_adapters, products

__all__ = ["reading_weights_once"]

_FORWARD = "forward"


@contextmanager
def reading_weights_once(blocks: Sequence[nn.Module], *, rows: int) -> Iterator[None]:
    """Replace linear and plain LoRA layers of blocks while a step of few rows is compiled.

    An adapter is not merged: in bf16 weights, rounding would lose most of an adapter early in training. Its narrow product is one
    more weight beside the layer's own. Layers of several active adapters, DoRA, merged or switched off ones stay unchanged.

    Args:
        blocks: Modules whose layers are replaced.
        rows: Rows of a step.
    """
    replaced = dict(one for block in blocks for one in _replaced(block)) if rows <= MOST_ROWS else {}
    for layer, forward in replaced.items():
        vars(layer)[_FORWARD] = forward
    try:
        yield
    finally:
        for layer in replaced:
            del vars(layer)[_FORWARD]


def _replaced(block: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    inside: set[nn.Module] = set()
    for layer in block.modules():
        if layer in inside or _FORWARD in vars(layer):
            continue
        if _is_plain_lora(layer):
            inside.update(layer.modules())
            yield layer, _adapted(layer)
        elif _is_plain_linear(layer):
            yield layer, _linear(layer)


def _is_plain_linear(layer: Any) -> bool:
    """Return whether a layer is a product with a dense weight and nothing else."""
    is_hooked = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not is_hooked


def _is_plain_lora(layer: Any) -> bool:
    kind = type(layer)
    if kind.__name__ != "Linear" or not kind.__module__.startswith("peft.tuners.lora"):
        return False
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    biased = any(layer.lora_B[name].bias is not None for name in names)
    plain = not (layer.disable_adapters or layer.merged or biased or layer.lora_variant or layer.fan_in_fan_out)
    return plain and len(names) == 1 and _is_plain_linear(layer.get_base_layer())


def _linear(layer: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        [result] = _own(layer, x)
        return result

    return forward


def _adapted(layer: Any) -> Callable[[Tensor], Tensor]:
    [name] = [name for name in layer.active_adapters if name in layer.lora_A]
    base, scale = layer.get_base_layer(), float(layer.scaling[name])
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight

    def forward(x: Tensor) -> Tensor:
        own, narrow = _own(base, x, [down])
        [result] = add_adapters([own], [narrow], [_cast(up, narrow.dtype)], [scale])
        return result

    return forward


def _own(layer: nn.Linear, x: Tensor, narrow: list[Tensor] | None = None) -> list[Tensor]:
    """Return the products of a layer's weight and of narrow ones, in the precision of torch."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dtype = layer.weight.dtype if autocast is None else autocast
    weights = [_cast(layer.weight, dtype), *(_cast(one, autocast or one.dtype) for one in narrow or [])]
    bias = None if layer.bias is None else _cast(layer.bias, dtype)
    return products(_cast(x, dtype), weights, [bias, *[None] * (len(weights) - 1)])


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # a cast to the same type would hide that layers share their input
