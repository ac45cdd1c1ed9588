"""Add a tensor's gradient to its sum within a backward function.

A function usually returns the gradient to the engine. The engine sums the gradients that a tensor gets from all its uses in a graph, and
only then adds them to `.grad`. So the output layer's gradient of tied embeddings waits for that of the embedding: a second tensor of the
weight's size would live during the backward pass of the whole network.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_unified.nn.autograd_limits import has_hooks

__all__ = ["add_gradient", "received_by"]

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # others, such as DTensor, may have sums of their own
_RECEIVER = "_lightning_unified_receiver"


def add_gradient(tensor: Tensor, gradient: Tensor) -> Tensor | None:
    """Add `gradient` to the sum of the tensor's gradients.

    Return None if it was added, and the gradient if the engine has to add it. The sum is `tensor.grad` if the engine would add the
    gradient to it later and do nothing else: no hook sees the gradient, no second derivative is recorded, and the pass accumulates into
    this tensor (`torch.autograd.grad` and `backward(inputs=...)` may not). Hooks of the leaf's `AccumulateGrad` node, which torch does not
    list, get the sum of the other gradients only.

    Args:
        tensor: An input of the backward function that runs.
        gradient: Its gradient, in any dtype to which sums of it are made.
    """
    receive = getattr(tensor, _RECEIVER, None)
    if receive is not None:
        receive(gradient)
        return None
    total = _open_sum(tensor)
    if total is None:
        return gradient
    total += gradient
    return None


@contextmanager
def received_by(receivers: Mapping[Tensor, Callable[[Tensor], None]]) -> Iterator[None]:
    """Let `add_gradient` hand gradients of some tensors to functions inside the block."""
    for tensor, receive in receivers.items():
        setattr(tensor, _RECEIVER, receive)
    try:
        yield
    finally:
        for tensor in receivers:
            delattr(tensor, _RECEIVER)


def _open_sum(tensor: Tensor) -> Tensor | None:
    """Return `tensor.grad` if a backward function may add to it."""
    total = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
    if total is None or type(tensor) not in _PLAIN or type(total) not in _PLAIN:
        return None
    if has_hooks(tensor) or total.layout != torch.strided or torch.is_grad_enabled():
        return None
    return total if _accumulates(tensor) else None


def _accumulates(leaf: Tensor) -> bool:
    """Return whether the running backward pass adds gradients to `leaf.grad`."""
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # torch raises where `torch.autograd.grad` asks for the leaf's gradient
        return False
