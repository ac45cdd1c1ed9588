"""The operations of a chunked cross-entropy, in two implementations with one interface.

`Eager` consists of torch's operators and runs anywhere. `Fused` runs on CUDA: Triton kernels that read a chunk of logits once, and a
matrix product that adds to a float32 sum in place. Its operations are registered with torch (`torch.ops.lightning_unified`), so that
fake tensors, a dry run and `torch.compile` see one operation and the memory it allocates.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

__all__ = ["IGNORED", "Eager", "Fused", "Kernels", "fused_on", "kernels_for"]

IGNORED = -100


class Kernels(Protocol):
    """Operations on a chunk of logits (N, V), in the dtype of the products."""

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return each row's loss (N) in at least float32, 0 where unscored.

        The second value is the tensor (N) that `gradient` needs again, or None.
        """
        ...

    def kept(self, logits: Tensor, labels: Tensor) -> Tensor | None:
        """Return the second value of `losses` alone."""
        ...

    def gradient(self, logits: Tensor, labels: Tensor, kept: Tensor | None, outer: Tensor) -> Tensor:
        """Return the gradient (N, V) of the losses weighted by `outer` (N).

        It has the dtype of `logits` and may overwrite them.
        """
        ...

    def losses_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's loss (N) in at least float32, and the gradient (N, V) of their sum.

        The gradient may use the memory of `logits`.
        """
        ...

    def product(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `left.T @ right` in `dtype`, which is at least float32."""
        ...

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add `left.T @ right` to `total`, which has at least float32."""
        ...


class Eager:
    """torch's operators; the softmax and all sums in at least float32."""

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED), None

    def kept(self, logits: Tensor, labels: Tensor) -> None:  # noqa: ARG002
        return None

    def gradient(self, logits: Tensor, labels: Tensor, kept: Tensor | None, outer: Tensor) -> Tensor:  # noqa: ARG002
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return _softmax_minus_one_hot_(wide, labels).mul_(outer.unsqueeze(1)).to(logits.dtype)

    def losses_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = functional.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED)
        return losses, _softmax_minus_one_hot_(wide, labels).to(logits.dtype)

    def product(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        return (left.T @ right).to(dtype)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total += left.T @ right


class Fused:
    """Triton kernels: logits in the dtype of the products, sums of products in float32."""

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        return torch.ops.lightning_unified.losses_of_rows(logits, labels)

    def kept(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.ops.lightning_unified.losses_of_rows(logits, labels)[1]

    def gradient(self, logits: Tensor, labels: Tensor, kept: Tensor | None, outer: Tensor) -> Tensor:
        torch.ops.lightning_unified.gradient_of_rows(logits, labels, kept, outer)
        return logits

    def losses_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.lightning_unified.losses_and_gradient_of_rows(logits, labels), logits

    def product(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.ops.lightning_unified.product(left, right, dtype)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        torch.ops.lightning_unified.add_product(total, left, right)


def kernels_for(tensor: Tensor, dtype: torch.dtype) -> Kernels:
    """Return the kernels for products in `dtype` on the tensor's device."""
    return Fused() if dtype != torch.float64 and fused_on(tensor.device) else Eager()


def fused_on(device: torch.device) -> bool:
    """Return whether `Fused` runs on the device: NVIDIA, compute capability 7.0 or more, Triton."""
    return device.type == "cuda" and torch.version.hip is None and _has_triton() and _capability(device.index) >= (7, 0)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _softmax_minus_one_hot_(logits: Tensor, labels: Tensor) -> Tensor:
    """Turn logits (N, V) into their summed loss's gradient, in place; unscored rows become 0."""
    scored = labels != IGNORED
    logits.sub_(logits.amax(1, keepdim=True)).exp_()
    logits.div_(logits.sum(1, keepdim=True))
    targets = labels.where(scored, 0).unsqueeze(1)
    logits.scatter_add_(1, targets, logits.new_full((1, 1), -1.0).expand(len(labels), 1))
    return logits.mul_(scored.unsqueeze(1))


@torch.library.custom_op("lightning_unified::losses_of_rows", mutates_args=(), device_types="cuda")
def _losses_of_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from lightning_unified.nn.cross_entropy import triton_kernels

    losses, log_sums = _results_of_losses(logits, labels)
    triton_kernels.losses_of_rows(logits, labels, losses, log_sums)
    return losses, log_sums


@_losses_of_rows.register_fake
def _results_of_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return tuple(torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))  # pyright: ignore[reportReturnType]


@torch.library.custom_op("lightning_unified::gradient_of_rows", mutates_args={"logits"}, device_types="cuda")
def _gradient_of_rows(logits: Tensor, labels: Tensor, log_sums: Tensor, outer: Tensor) -> None:
    from lightning_unified.nn.cross_entropy import triton_kernels

    triton_kernels.gradient_of_rows(logits, labels, log_sums, outer)


@torch.library.custom_op("lightning_unified::losses_and_gradient_of_rows", mutates_args={"logits"}, device_types="cuda")
def _losses_and_gradient_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    from lightning_unified.nn.cross_entropy import triton_kernels

    losses = _result_of_losses(logits, labels)
    triton_kernels.losses_and_gradient_of_rows(logits, labels, losses)
    return losses


@_losses_and_gradient_of_rows.register_fake
def _result_of_losses(logits: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


@torch.library.custom_op("lightning_unified::product", mutates_args=(), device_types="cuda")
def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.T @ right if left.dtype == dtype else torch.mm(left.T, right, out_dtype=dtype)


@_product.register_fake
def _result_of_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(left.shape[1], right.shape[1], dtype=dtype, device=left.device)


@torch.library.custom_op("lightning_unified::add_product", mutates_args={"total"}, device_types="cuda")
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        torch.addmm(total, left.T, right, out=total)
    else:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)


@_gradient_of_rows.register_fake
@_add_product.register_fake
def _writes_in_place(*operands: Tensor) -> None:
    """Return nothing: the operation allocates nothing."""


@register_flop_formula(torch.ops.lightning_unified.product)
def _flops_of_new_product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the floating-point operations of `left.T @ right`; the arguments are shapes."""
    return 2 * left[0] * left[1] * right[1]


@register_flop_formula(torch.ops.lightning_unified.add_product)
def _flops_of_product(total: Any, left: Any, right: Any, **_: Any) -> int:  # noqa: ARG001
    """Return the floating-point operations of `left.T @ right`; the arguments are shapes."""
    return 2 * left[0] * left[1] * right[1]
