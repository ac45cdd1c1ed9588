"""Kernels of a chunk of logits that autograd derives from a loss."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.nn.cross_entropy.kernels import IGNORED, kernels_for

__all__ = ["Derived", "transformed", "without_saved_tensor_hooks"]


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """Kernels that differentiate a loss of logits.

    They implement `lightning_unified.nn.cross_entropy.kernels.Kernels`.

    Attributes:
        loss: Returns each row's loss (N), in at least float32, from logits (N, V) and labels (N).
    """

    loss: Callable[[Tensor, Tensor], Tensor]

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        return self.loss(logits, labels), None

    def kept(self, logits: Tensor, labels: Tensor) -> None:  # noqa: ARG002
        return None

    def gradient(self, logits: Tensor, labels: Tensor, kept: Tensor | None, outer: Tensor) -> Tensor:  # noqa: ARG002
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad(), without_saved_tensor_hooks():
            (found,) = torch.autograd.grad(self.loss(leaf, labels), leaf, outer)
        return found

    def losses_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad(), without_saved_tensor_hooks():
            losses = self.loss(leaf, labels)
            (found,) = torch.autograd.grad(losses, leaf, torch.ones_like(losses))
        return losses.detach(), found

    def product(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        return kernels_for(left, left.dtype).product(left, right, dtype)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        kernels_for(left, left.dtype).add_product(total, left, right)


def transformed(transform: Callable[[Tensor], Tensor]) -> Derived:
    """Return the kernels of the cross-entropy of `transform(logits)`."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        logits = transform(logits)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED)

    return Derived(loss)


def without_saved_tensor_hooks() -> contextlib.AbstractContextManager[None]:
    """Disable saved-tensor hooks, such as a checkpoint's, for a gradient that is taken at once."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
