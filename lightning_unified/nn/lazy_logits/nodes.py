"""Tensors without storage in autograd: their nodes, and operations that write into them."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["has_own_node", "writes_in_place"]

_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "matmul",
)
_AUGMENTED = {f"__i{operator}__" for operator in _OPERATORS}
_OWN = "InGraphBackward"  # of the autograd functions that make these tensors


def has_own_node(value: Tensor) -> bool:
    """Return whether a tensor stands where it was made in the graph.

    The user's autograd functions may return a tensor that their forward pass made, or write into their argument. Autograd then gives
    the same object another node, and only this node knows the gradient.
    """
    with torch._C.DisableTorchFunctionSubclass():
        node = value.grad_fn
    return node is None or node.name() == _OWN


def writes_in_place(func: Any) -> bool:
    """Return whether an operation changes its first argument and returns it: `mul_`, `__imul__`."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED
