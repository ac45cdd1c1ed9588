"""Shapes of operations that torch's fake mode refuses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["OWN_KERNELS", "run_on_zeros"]

aten = torch.ops.aten
_MATRIX = 2
_ALIGNMENT_BYTES = 16  # of the rows of a grouped product
_MOST_BYTES = 1 << 28  # judgement: of the zeros that an operation without a fake kernel is run on


def _grouped_product(
    first: Tensor,
    second: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of groups of matrices in any dtype; torch's kernel takes bfloat16 only.

    Groups are parts of the rows of a matrix, parts of the depth of two matrices, or entries of a batch. Rows of the result are
    aligned.

    Source:
        torch's `native/GroupedMMUtils.h`, `create_grouped_gemm_output_tensor`.
    """
    del bias
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == second.dim():
        groups = first.shape[0] if first.dim() > _MATRIX or offs is None else offs.shape[0]
        shape = (groups, rows, columns)
    else:
        shape = (rows, columns)
    dtype = out_dtype or first.dtype
    entries = max(_ALIGNMENT_BYTES // dtype.itemsize, 1)
    wide = -(-columns // entries) * entries
    return first.new_empty_strided(shape, (rows * wide, wide, 1)[-len(shape) :], dtype=dtype)


def _like_the_logits(_gradient: Tensor, logs: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(logs, memory_format=torch.contiguous_format)


OWN_KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_product,
    aten._ctc_loss_backward.default: _like_the_logits,
    aten._ctc_loss_backward.Tensor: _like_the_logits,
}


def run_on_zeros(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an operation's results as meta tensors, by running it on zeros on the host.

    A random operation draws from the host's own generator, whose state is put back.

    Raises:
        NotImplementedError: If the operation writes its arguments or takes too many bytes.
    """
    tensors = [each for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor)]
    count = sum(each.numel() * each.element_size() for each in tensors)
    if func._schema.is_mutable or count > _MOST_BYTES:
        raise NotImplementedError(f"{func} has no fake kernel")

    def zeros(fake: Tensor) -> Tensor:
        real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
        return real.zero_()

    def layout(real: Tensor) -> Tensor:
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")

    def host_generator(_: torch.Generator) -> None:
        return None

    with no_dispatch(), torch.no_grad(), torch.random.fork_rng(devices=()):
        given = tree_map_only(torch.Generator, host_generator, (tuple(args), dict(kwargs)))
        positional, named = tree_map_only(Tensor, zeros, given)
        results = func(*positional, **named)
        return tree_map_only(Tensor, layout, results)
