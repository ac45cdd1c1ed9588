"""The kernels as operators of torch, so that compiled blocks contain them."""

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["HALF", "MOST_ROWS", "add_adapters", "attend_token", "draws_by_kernel", "has_kernels", "products"]

log = logging.getLogger("lightning_unified")

HALF = (torch.bfloat16, torch.float16)
"""Dtypes of the kernels' inputs."""

MOST_ROWS = 64
"""Judgement: rows for which reading the weights takes most of a product's time."""


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on the device.

    They need an NVIDIA GPU of compute capability 8.0 or more, and Triton.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@cache
def draws_by_kernel(device: torch.device) -> bool:
    """Return whether the kernels that draw a token run on the device.

    To compile them, Triton needs a C compiler.
    """
    if not has_kernels(device):
        return False
    from lightning_unified.models.grpo.rollout.few_rows.triton_draw import draw_tokens

    try:
        draw_tokens(torch.zeros(1, 1, device=device), None, temperature=1.0)
    except Exception as error:  # Triton raises what the C compiler's process raises
        log.debug("Tokens are drawn by operators of torch: %s", error)
        return False
    return True


@torch.library.custom_op("lightning_unified::products_of_few_rows", mutates_args=())
def products(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Return x @ weight.T + bias for each weight, in the weight's dtype.

    Shapes:
        x (..., K), weights (N, K), biases (N); results (..., N).

    In half precision on CUDA the weights share one launch, which is made for up to `MOST_ROWS` rows. The product with a single weight is
    torch's there for three rows and more, because it is faster.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not x.is_cuda or x.dtype not in HALF or (len(weights) == 1 and len(rows) > 2):
        return [
            functional.linear(x.to(weight.dtype), weight, bias) for weight, bias in zip(weights, biases, strict=True)
        ]
    from lightning_unified.models.grpo.rollout.few_rows import triton_kernels

    found = triton_kernels.products(rows.contiguous(), [one.contiguous() for one in weights], biases)
    return [one.view(*x.shape[:-1], -1) for one in found]


@products.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:  # noqa: ARG001
    return [x.new_empty(*x.shape[:-1], len(weight), dtype=weight.dtype) for weight in weights]


@torch.library.custom_op("lightning_unified::add_adapters", mutates_args=())
def add_adapters(bases: list[Tensor], narrows: list[Tensor], ups: list[Tensor], scales: list[float]) -> list[Tensor]:
    """Return base + (narrow @ up.T) * scale for each base.

    Shapes:
        bases (..., N), narrows (..., R), ups (N, R).

    Each operation is rounded to the dtype of `narrow`, and the result to that of `base`. All share one launch on CUDA.
    """
    if not bases[0].is_cuda:
        return [
            (base + functional.linear(narrow, up) * scale).to(base.dtype)
            for base, narrow, up, scale in zip(bases, narrows, ups, scales, strict=True)
        ]
    from lightning_unified.models.grpo.rollout.few_rows import triton_kernels

    rows, inner = ([one.reshape(-1, one.shape[-1]).contiguous() for one in each] for each in (bases, narrows))
    found = triton_kernels.add_adapters(rows, inner, [one.contiguous() for one in ups], scales)
    return [one.view(base.shape) for one, base in zip(found, bases, strict=True)]


@add_adapters.register_fake
def _(bases: list[Tensor], narrows: list[Tensor], ups: list[Tensor], scales: list[float]) -> list[Tensor]:  # noqa: ARG001
    return [torch.empty_like(base, memory_format=torch.contiguous_format) for base in bases]


@torch.library.custom_op("lightning_unified::attend_token", mutates_args=())
def attend_token(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention (N, H, 1, D) of one token to L slots.

    Args:
        query: Queries (N, H, 1, D).
        keys: Keys (N, K, L, D); each of the K heads serves H / K heads of the query.
        values: Values (N, K, L, D).
        mask: Added to the scores (N, 1, 1, L).
        scale: Factor of the products.
    """
    if not query.is_cuda:
        (N, H, _, D), K = query.shape, keys.shape[1]
        mixed = functional.scaled_dot_product_attention(
            query.reshape(N, K, H // K, D), keys, values, attn_mask=mask, scale=scale
        )
        return mixed.reshape(N, H, 1, D)
    from lightning_unified.models.grpo.rollout.few_rows import triton_kernels

    return triton_kernels.attend(query.contiguous(), keys.contiguous(), values.contiguous(), mask.contiguous(), scale)


@attend_token.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:  # noqa: ARG001
    return torch.empty_like(query, memory_format=torch.contiguous_format)
