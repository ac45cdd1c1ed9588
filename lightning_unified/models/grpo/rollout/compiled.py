"""Compile a model's blocks for decoding: one compilation serves all blocks of a class.

A decode step of a few rows mainly reads every weight once, so its time is the memory traffic plus a delay for each kernel.
Compilation fuses the many small kernels of norms, rotary positions and adapters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.models.grpo.rollout.static_cache import LayerCache

__all__ = ["can_compile", "compiled_blocks", "unmerged_adapters"]

_FORWARD = "forward"
_MOST_VARIANTS = 64  # one for each number of rows and length; beyond torch's own limit of 8, calls would be eager
_FEW_ROWS = 16  # judgement: with more rows, a separate matrix product is faster than a sum in the fused kernel


def can_compile(device: torch.device) -> bool:
    """Return whether torch can compile kernels for this device."""
    return device.type == "cuda" and find_spec("triton") is not None


@contextmanager
def compiled_blocks(
    blocks: Sequence[nn.Module], caches: Sequence[LayerCache], *, backend: str = "inductor"
) -> Iterator[None]:
    """Run each block compiled, with its own layer of the cache; a replaced forward is skipped.

    A block indexes its cache by its own number, and a compilation would depend on that number. So each block receives its layer only.
    Inside a fused kernel, values are rounded as if each operation stored its result: the loss pass rounds there too, and the sampled
    policy must equal the trained one.
    """
    from torch._inductor import config as inductor  # imported only if a block is compiled

    run = torch.compile(_run, backend=backend, dynamic=False)
    stood_in = [vars(block).get(_FORWARD) for block in blocks]
    for block, layer in zip(blocks, caches, strict=True):
        vars(block)[_FORWARD] = _with_own_layer(run, block, layer)
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=_MOST_VARIANTS),
            inductor.patch(emulate_precision_casts=True),
        ):
            yield
    finally:
        for block, own in zip(blocks, stood_in, strict=True):
            del vars(block)[_FORWARD]
            if own is not None:
                vars(block)[_FORWARD] = own


def _run(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _with_own_layer(run: Any, block: nn.Module, layer: LayerCache) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" not in kwargs:
            raise RuntimeError(f"{type(block).__name__} is given no past_key_values.")
        return run(block, args, {**kwargs, "past_key_values": layer})

    return forward


@contextmanager
def unmerged_adapters(model: nn.Module, *, rows: int) -> Iterator[None]:
    """Compute plain LoRA products as sums, which a compiler fuses, if there are few rows.

    The adapter is not merged: in bf16 weights, rounding would lose most of an adapter early in training. Other layers (DoRA, merged, switched
    off) stay unchanged.
    """
    layers = [layer for layer in model.modules() if _is_plain_lora(layer)] if rows <= _FEW_ROWS else []
    for layer in layers:
        vars(layer)[_FORWARD] = _unmerged(layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)[_FORWARD]


def _is_plain_lora(layer: Any) -> bool:
    kind = type(layer)
    if kind.__name__ != "Linear" or not kind.__module__.startswith("peft.tuners.lora") or _FORWARD in vars(layer):
        return False
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    biased = any(layer.lora_B[name].bias is not None for name in names)
    return not (layer.disable_adapters or layer.merged or biased or layer.lora_variant or layer.fan_in_fan_out)


def _unmerged(layer: Any) -> Any:
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    base = layer.get_base_layer()
    pairs = [(layer.lora_A[name], layer.lora_B[name], layer.scaling[name]) for name in names]

    def forward(x: Tensor) -> Tensor:
        result = base(x)
        total = result
        for down, up, scale in pairs:
            total = total + _product(_product(x, down.weight), up.weight) * scale
        return total.to(result.dtype)

    return forward


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (..., K) @ weight (N, K) transposed, as a sum rounded like the matrix product."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return (x.to(dtype).float().unsqueeze(-2) * weight.to(dtype).float()).sum(-1).to(dtype)
