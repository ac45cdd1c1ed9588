"""Logits as a tensor without storage.

Its metadata is known, and its values are computed when an operation reads them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_unified.nn.autograd_limits import refuse_second_derivative
from lightning_unified.nn.cross_entropy.derived import without_saved_tensor_hooks
from lightning_unified.nn.lazy_logits.nodes import has_own_node
from lightning_unified.nn.lazy_logits.source import NO_SECOND, Source

__all__ = ["LazyLogits", "View", "lazy", "lazy_among", "values_of"]

_NAMES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_cuda",
    "is_leaf",
    "grad_fn",
    "is_sparse",
    "is_mps",
)
_MORE_NAMES = ("is_meta", "is_quantized", "itemsize", "is_nested", "is_cpu", "is_xpu", "output_nr", "_version")
_METADATA: set[Any] = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_floating_point, torch.is_floating_point,
    torch.is_tensor, torch.Tensor.get_device, torch.Tensor.__len__, torch.numel, torch.Tensor.ndimension, torch.Tensor.is_complex,
    torch.is_complex, torch.Tensor.nelement, torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.is_inference,
    torch.is_inference, torch.Tensor.__hash__,
    *(getattr(torch.Tensor, name).__get__ for name in (*_NAMES, *_MORE_NAMES) if hasattr(torch.Tensor, name)),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The part of a source's logits that a lazy tensor shows.

    Attributes:
        source: The computation of the logits.
        hidden: The hidden states of the positions of this view.
        shape: The shape of the view.
        classes: The dimension of the classes.
        path: The calls that lead from the source's logits to the view.
        is_tracked: Whether gradients flow through the view.
    """

    source: Source
    hidden: Tensor
    shape: tuple[int, ...]
    classes: int
    path: tuple[Callable[[Tensor], Tensor], ...]
    is_tracked: bool

    def computed(self) -> Tensor:
        """Return the values as a view of the source's logits.

        It has a graph if gradients flow through it. In-place operations reach all views of them.
        """
        value = self.source.computed()
        for view in self.path:
            value = view(value)
        return value if self.is_tracked else value.detach()

    def passing(self) -> Tensor:
        """Return the values without a graph, computed for this view alone and not kept."""
        with torch.no_grad():
            if self.source.real is not None or not self.source.is_current:
                return self.computed()
            last = len(self.shape) - 1
            shape = [length for at, length in enumerate(self.shape) if at != self.classes]
            logits = self.source.logits_of(self.hidden, (*shape, self.shape[self.classes]))
            return logits if self.classes == last else logits.movedim(-1, self.classes)


class LazyLogits(torch.Tensor):
    """Logits that have not been computed.

    An operation is looked up in `lightning_unified.nn.lazy_logits.operations`: it is recorded, runs in chunks, or reads the values.
    """

    view_of_logits: View

    @staticmethod
    @override
    def __new__(cls, view: View, dtype: torch.dtype) -> "LazyLogits":  # noqa: ANN001, PYI034  pyright has no Self here
        made = torch.Tensor._make_wrapper_subclass(cls, view.shape, dtype=dtype, device=view.hidden.device)
        made.view_of_logits = view
        return made

    @override
    def __init__(self, view: View, dtype: torch.dtype) -> None:
        super().__init__()

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or not all(map(has_own_node, lazy_among(args, kwargs))):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        from lightning_unified.nn.lazy_logits.operations import run  # it makes lazy tensors itself

        return run(func, args, kwargs)

    @classmethod
    @override
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation that bypassed `__torch_function__`, e.g. inside an autograd function."""
        given: dict[str, Any] = tree_map(values_of, dict(kwargs or {}))
        return func(*tree_map(values_of, args), **given)


def lazy_among(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[LazyLogits]:
    """Return the lazy logits among the arguments of an operation."""
    return [one for one in tree_leaves((args, dict(kwargs))) if isinstance(one, LazyLogits)]


def values_of(value: Any) -> Any:
    """Return the values of a lazy tensor without a graph, and anything else as it is."""
    if not isinstance(value, LazyLogits):
        return value
    view = value.view_of_logits
    view.source.call.say("an operation inside autograd")
    return view.passing()


def lazy(view: View, dtype: torch.dtype) -> LazyLogits:
    """Return lazy logits; those that are tracked have a place in autograd's graph."""
    if not view.is_tracked:
        return LazyLogits(view, dtype)
    return InGraph.apply(view, dtype, view.hidden, *view.source.trained)  # pyright: ignore[reportReturnType]


class InGraph(torch.autograd.Function):
    """Connects lazy logits with the graph, for operations that come past `__torch_function__`."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        view, dtype, *_ = args
        ctx.view = view
        return LazyLogits(view, dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        refuse_second_derivative(*NO_SECOND)
        view: View = ctx.view
        source = view.source
        if not source.is_current:
            raise RuntimeError(
                f"the gradient of the logits of {type(source.call.head).__name__} is taken after its weights were changed in place."
            )
        hidden = view.hidden.detach().requires_grad_(view.hidden.requires_grad)
        trained = {id(one): one.detach().requires_grad_() for one in source.trained}
        with torch.enable_grad(), without_saved_tensor_hooks(), source.call.swapped(trained):
            logits = source.call(hidden, caches=False)
            logits = logits.reshape(-1, logits.shape[-1])
            for step in source.steps:
                logits = step(logits, trained)
            outer = grad_outputs[0].movedim(view.classes, -1).reshape(logits.shape).to(logits.dtype)
            wanted = [one for one in (hidden, *trained.values()) if one.requires_grad]
            found = iter(torch.autograd.grad(logits, wanted, outer, allow_unused=True))
        return None, None, next(found) if hidden.requires_grad else None, *found
