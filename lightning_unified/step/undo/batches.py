"""Restore a batch that a failed step has changed."""

from typing import Any

from torch import Tensor

from lightning_unified.errors import RunError
from lightning_unified.step.undo.walk import Walk

__all__ = ["BatchWatch"]


class BatchWatch:
    """The containers, objects and tensors of a batch, restored for another attempt.

    Contents of containers and attributes of objects (graphs, dataclasses) are restored. Tensors are not copied; the version counter shows
    whether one was written in place.
    """

    def __init__(self, batch: Any) -> None:
        found = Walk().value(batch, (None, "batch", "global")).found
        self._batch, self._cells = batch, found.cells
        tensors = [one.tensor for one in found.tensors if not one.tensor.is_inference()]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._leaves = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors if tensor.is_leaf]

    def again(self) -> Any:
        """Restore the batch for another attempt, and return it.

        Raises:
            RunError: If the failed attempt wrote one of its tensors in place.
        """
        for cell, contents in self._cells:
            cell.restore(contents)
        if any(tensor._version != version for tensor, version in self._versions):
            raise RunError(
                "memory ran out in a step that had changed a tensor of its batch in place, so the step cannot be repeated exactly; "
                "let training_step make new tensors, or change the batch in MicroBatchRules(prepare=…), which runs once."
            )
        for tensor, requires_grad, gradient in self._leaves:
            _set_leaf(tensor, requires_grad=requires_grad, gradient=gradient)
        return self._batch


def _set_leaf(tensor: Tensor, *, requires_grad: bool, gradient: Tensor | None) -> None:
    """Restore `requires_grad` and `grad` of a leaf tensor."""
    if tensor.requires_grad != requires_grad and tensor.is_leaf:
        tensor.requires_grad_(requires_grad)
    if tensor.grad is not gradient:
        tensor.grad = gradient
