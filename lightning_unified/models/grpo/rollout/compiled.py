"""Compile a model's blocks for decoding: one compilation serves all blocks of a class.

A decode step of a few rows mainly reads every weight once, so its time is the memory traffic plus a delay for each kernel.
Compilation fuses the many small kernels of norms and rotary positions, and joins products of one input (`few_rows`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lightning_unified.models.causal_lm.language_model import cache_argument
from lightning_unified.models.grpo.rollout.few_rows.sharing import joining
from lightning_unified.models.grpo.rollout.static_cache import LayerCache

__all__ = ["can_compile", "compiled_blocks"]

_FORWARD = "forward"
_MOST_VARIANTS = 64  # one for each number of rows and length; beyond torch's own limit of 8, calls would be eager


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
    policy must equal the trained one. Kernels that do not depend on each other share a launch: the rotary positions of queries and keys, and
    the writes to the cache.
    """
    from torch._dynamo import lookup_backend  # imported only if a block is compiled
    from torch._inductor import config as inductor

    run = torch.compile(_run, backend=joining(lookup_backend(backend)), dynamic=False)
    stood_in = [vars(block).get(_FORWARD) for block in blocks]
    for block, layer in zip(blocks, caches, strict=True):
        vars(block)[_FORWARD] = _with_own_layer(run, block, layer)
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=_MOST_VARIANTS),
            inductor.patch(emulate_precision_casts=True, combo_kernels=True),
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
    name = cache_argument(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if name not in kwargs:
            raise RuntimeError(f"{type(block).__name__} is given no {name}.")
        return run(block, args, {**kwargs, name: layer})

    return forward
