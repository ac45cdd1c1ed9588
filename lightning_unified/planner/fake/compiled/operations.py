"""Operations of a compiler's graph: which ones compiled code fuses into kernels of its own."""

import operator

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

__all__ = ["bytes_of", "is_fusible", "is_reduction", "is_view"]

_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "var",
        "var_mean",
        "std",
        "std_mean",
        "prod",
        "any",
        "all",
        "argmax",
        "argmin",
        "logsumexp",
        "cumsum",
    ]
)
_COPIES = frozenset(
    [
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "index",
        "gather",
        "embedding",
        "constant_pad_nd",
        "select_scatter",
        "slice_scatter",
        "as_strided_scatter",
        "convert_element_type",
        "copy",
        "repeat",
        "flip",
        "roll",
        "where",
        "masked_fill",
        "tril",
        "triu",
    ]
)
_CREATED = frozenset(
    [
        "full",
        "full_like",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "empty",
        "empty_like",
        "new_zeros",
        "new_full",
        "new_empty",
        "arange",
        "iota",
        "scalar_tensor",
        "rand",
        "randn",
        "randint",
        "bernoulli",
        "inductor_random",
        "inductor_seeds",
        "inductor_lookup_seed",
    ]
)


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's tensors."""
    tensors = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


def is_reduction(node: fx.Node) -> bool:
    """Return whether the operation reduces its input, or scans it."""
    return _name(node) in _REDUCTIONS


def is_fusible(node: fx.Node) -> bool:
    """Return whether compiled code computes the operation in its kernels.

    Others are library calls, inputs and the output.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_fusible(source)
    if not isinstance(node.target, torch._ops.OpOverload):
        return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("val")))
    if is_view(node) or torch.Tag.pointwise in node.target.tags:
        return True
    return _name(node) in _REDUCTIONS or _name(node) in _COPIES or _name(node) in _CREATED or _fills_constant(node)


def _fills_constant(node: fx.Node) -> bool:
    """Return whether the operation writes one value at some entries of a constant tensor.

    The compiler turns it into a choice by index: the gradient of a loss by class is made so.
    """
    if _name(node) != "scatter":
        return False
    base, *_, value = node.args
    is_constant = isinstance(base, fx.Node) and _name(base) in {"full", "zeros_like", "full_like", "zeros"}
    return is_constant and isinstance(value, (int, float))


def is_view(node: fx.Node) -> bool:
    """Return whether the result shares the memory of an input."""
    if node.target is operator.getitem:
        return True
    return bool(getattr(node.target, "is_view", False)) or _name(node) in {"_unsafe_view", "_reshape_alias"}


def _name(node: fx.Node) -> str:
    """Return the name of the operation, without its overload; empty for other nodes."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")
