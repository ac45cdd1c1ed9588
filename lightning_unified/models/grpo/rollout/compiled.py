"""Blocks of a model compiled for one token a row: one compilation serves all blocks of a kind.

A decode step of a few rows reads every weight once and does little else, so that its time is the memory's, plus a delay for each
kernel. Compiled, the many small kernels of norms, rotary positions and adapters become few.
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
_MOST_VARIANTS = 64  # one for each number of rows and length in use; torch's own limit of 8 would end in eager calls
_FEW_ROWS = 16  # judgement: above, a matrix product of its own is faster than a sum in the fused kernel


def can_compile(device: torch.device) -> bool:
    """Return whether torch's compiler makes kernels for this device here."""
    return device.type == "cuda" and find_spec("triton") is not None


@contextmanager
def compiled_blocks(
    blocks: Sequence[nn.Module], caches: Sequence[LayerCache], *, backend: str = "inductor"
) -> Iterator[None]:
    """Let each block run compiled, with its own layer of the cache; what stands in for a block's forward is skipped.

    A block asks its cache by its own number, on which a compilation would depend: so each is given only its layer. Between the
    operations that become one kernel, values are rounded as if each were stored: the loss pass rounds there too, and what is sampled
    from is to be what is trained.
    """
    from torch._inductor import config as inductor  # not before a block is compiled

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
    """Let peft's plain LoRA layers add their product as sums that a compiler fuses, while there are few rows.

    The adapter stays beside the matrix: merged into bf16 weights, most of a young adapter is rounded away. Layers of other kinds
    (DoRA, merged, switched off) are left as they are.
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
    """Return x (..., K) times weight (N, K) transposed as a sum, rounded as the matrix product would be."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return (x.to(dtype).float().unsqueeze(-2) * weight.to(dtype).float()).sum(-1).to(dtype)
