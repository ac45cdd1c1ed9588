"""Marks that a step counts on the device: a lost command buffer loses the marks in it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_unified.nn.autograd_limits import in_a_transform

__all__ = ["Canary"]

# Judgement: marks within a forward pass, and as many within a backward pass. A command buffer that holds an eighth of a pass
# contains one. Each mark is one more kernel of a micro-batch.
_MARKS = 8

T = TypeVar("T")


class Canary:
    """A count on the device that the step increments, and the same count on the host.

    A mark is one in-place addition, put into the stream between the step's own operations. torch has one stream for Metal, so a mark
    lies in the command buffer of its neighbours. A buffer that is aborted runs none of its kernels; its marks are then missing from
    the count on the device. Marks lie before and after each backward pass, after the forward passes of eight modules and after the
    gradients of eight parameters, spread evenly in the order of registration, and on both sides of the optimizer's kernels. So the
    opposite fault, in which the marks survive and other work is lost, needs a buffer that fits between two marks. Only the runtime's
    message shows such a fault.

    A value that depends on the results would not show more. Lost kernels leave the earlier content of the memory in their outputs, which
    is most often finite and plausible; and a loss that is not finite may be the module's own.

    The count is never reset, because the reset could be lost with the marks.

    Args:
        module: The module to train. It gets hooks, which `close` removes. They do nothing while `is_active` is False, inside
            compiled code and in copies of the module.
        optimizers: The optimizers that write its weights; their hooks make the marks behind them.
        device: The device that counts.

    Attributes:
        is_active: Whether modules, parameters and optimizers make marks: in a real step, not in a dry run.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        self.is_active = False
        self._device = device
        self.start_over()
        leaves = [child for child in module.modules() if next(child.children(), None) is None]
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        inside = _Mark(self._mark_inside)
        self._hooks = [leaf.register_forward_hook(inside) for leaf in _spread(leaves)]
        self._hooks += [parameter.register_post_accumulate_grad_hook(inside) for parameter in _spread(trained)]
        # right behind the kernels: a hook or a logger that reads a number would end the command buffer before a later mark
        self._hooks += [optimizer.register_step_post_hook(inside) for optimizer in optimizers]

    def start_over(self) -> None:
        """Count from zero in new memory, after a fault."""
        self._count = torch.zeros((), dtype=torch.int64, device=self._device)
        self._one = torch.ones(
            (), dtype=torch.int64, device=self._device
        )  # a Python number would become a tensor at each mark
        self._expected = 0

    def mark(self) -> None:
        """Add one to the count."""
        self._count.add_(self._one)
        self._expected += 1

    def missing(self) -> int:
        """Return the number of marks that the device has lost; wait for the device.

        A garbage count gives another number than 0.
        """
        return self._expected - int(self._count.item())

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _mark_inside(self) -> None:
        if self.is_active and not in_a_transform():  # of `torch.func`, which refuses to write the count
            self.mark()


class _Mark:
    """A hook that makes a mark; copies of the module and other processes make none.

    Attributes:
        leaves_gradients: Tells `MicroBatchBackward` that this hook writes no gradient.
    """

    leaves_gradients = True

    def __init__(self, mark: Callable[[], None] | None = None) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return _Mark, ()

    def __call__(self, *_: Any) -> None:
        # asked first: while Dynamo traces, nothing else of this function may be seen
        if not torch.compiler.is_compiling() and self._mark is not None:
            self._mark()


def _spread(values: Sequence[T]) -> list[T]:
    """Return at most `_MARKS` of the values, evenly spaced, the last among them."""
    count = min(_MARKS, len(values))
    return [values[(place + 1) * len(values) // count - 1] for place in range(count)]
