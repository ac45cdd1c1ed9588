"""Hidden states whose product with an embedding table is an output head.

They stand for a tensor that exists. Every operation gets this tensor, except for a product that becomes lazy logits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_unified.nn.lazy_logits.nodes import has_own_node, writes_in_place

__all__ = ["HiddenStates", "Product", "hidden_states"]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
"""Returns the lazy `linear(hidden, weight, bias)`, or None for an ordinary product."""

_T = torch.Tensor
_MATRIX_PRODUCTS: set[Any] = {torch.matmul, torch.mm, _T.matmul, _T.mm, _T.__matmul__}
_STILL_HIDDEN: set[Any] = {
    _T.__getitem__, _T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.contiguous, _T.narrow, torch.narrow,
    _T.to, _T.float, _T.bfloat16, _T.half, _T.type_as, _T.mul, torch.mul, _T.__mul__, _T.__rmul__, _T.div, torch.div, _T.__truediv__,
    functional.dropout,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Meaning:
    states: Tensor
    product: Product


class HiddenStates(torch.Tensor):
    """A tensor in whose place an operation gets the hidden states themselves."""

    meaning: _Meaning

    @staticmethod
    @override
    def __new__(cls, meaning: _Meaning) -> "HiddenStates":  # noqa: ANN001, PYI034  pyright has no Self here
        states = meaning.states
        made = torch.Tensor._make_wrapper_subclass(
            cls, states.shape, strides=states.stride(), dtype=states.dtype, device=states.device
        )
        made.meaning = meaning
        return made

    @override
    def __init__(self, meaning: _Meaning) -> None:
        super().__init__()

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = [one for one in tree_leaves((args, dict(kwargs or {}))) if isinstance(one, HiddenStates)]
        if not all(map(has_own_node, found)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        first = args[0] if args and isinstance(args[0], HiddenStates) else None
        given: dict[str, Any] = tree_map(_itself, dict(kwargs or {}))
        args = tree_map(_itself, args)
        if first is None:
            return func(*args, **given)
        product = first.meaning.product
        if operands := _operands(func, args, given):
            logits = product(*operands)
            if logits is not None:
                return logits
        result = func(*args, **given)
        if writes_in_place(func):
            return first
        is_hidden = func in _STILL_HIDDEN and type(result) is type(args[0]) and result.shape[-1:] == args[0].shape[-1:]
        return hidden_states(result, product) if is_hidden and torch.is_grad_enabled() else result

    @classmethod
    @override
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation that bypassed `__torch_function__`, e.g. inside an autograd function."""
        given: dict[str, Any] = tree_map(_detached, dict(kwargs or {}))
        return func(*tree_map(_detached, args), **given)


def hidden_states(states: Tensor, product: Product) -> Tensor:
    """Return `states` so that `product` is asked about their products with a matrix."""
    return InGraph.apply(_Meaning(states, product), states)  # pyright: ignore[reportReturnType]


class InGraph(torch.autograd.Function):
    """Connects the stand-in with the graph, for operations that bypass `__torch_function__`."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        return HiddenStates(args[0])

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return None, grad_outputs[0]


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return hidden states, weight (V, D) and bias of a product; None for another operation."""
    if func is functional.linear:
        names = ("input", "weight", "bias")
        given = {"bias": None, **dict(zip(names, args, strict=False)), **kwargs}
        return given["input"], given["weight"], given["bias"]
    if func in _MATRIX_PRODUCTS and len(args) == 2 and not kwargs:
        table = _transposed(args[1])
        return None if table is None else (args[0], table, None)
    return None


def _transposed(view: Tensor) -> Tensor | None:
    """Return the matrix that `view` transposes as a whole; None for another tensor."""
    base = view._base
    if base is None or base.dim() != 2 or view.shape != base.shape[::-1] or view.stride() != base.stride()[::-1]:
        return None
    return base if view.storage_offset() == base.storage_offset() else None


def _itself(value: Any) -> Any:
    return value.meaning.states if isinstance(value, HiddenStates) else value


def _detached(value: Any) -> Any:
    return value.meaning.states.detach() if isinstance(value, HiddenStates) else value
