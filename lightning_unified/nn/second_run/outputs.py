"""Compare two runs of a block: its outputs, and the results of its operations."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_unified.nn.second_run.modes import BlockMode
from lightning_unified.nn.second_run.projections import Projections

__all__ = ["Observed"]

# Judgement: relative tolerances. A CPU rounds alike twice; kernels of a GPU may add in another order, or choose another algorithm.
_DOUBLE, _SINGLE, _SINGLE_ON_DEVICES, _HALF = 1e-9, 1e-5, 1e-3, 2e-2


class Observed(BlockMode):
    """Dispatch mode that keeps projections of each operation's result in one run of a block.

    Operations count because a block's output may hide a difference that its gradients have. A normalised output, for example, does not
    depend on the scale of its input. Left out are operations on tensor subclasses, and those that write into tensors or return
    uninitialised ones, whose other entries may be of no use to the block.

    Args:
        looks_inside: Whether operations count, or outputs only.
    """

    def __init__(self, *, looks_inside: bool) -> None:
        super().__init__()
        self._looks_inside = looks_inside
        self._names: list[Any] = []
        self._results, self._outputs = Projections(), Projections()
        self._tolerance = 0.0

    def run(self, function: Any, values: Any) -> Any:
        """Return `function(*values)`, and keep projections of its outputs."""
        if self._looks_inside:
            with self:
                outputs = function(*values)
        else:
            outputs = function(*values)
        for leaf in tree_leaves(outputs):
            if _is_comparable(leaf):
                self._outputs.add(leaf)
                self._tolerance = max(self._tolerance, _tolerance(leaf))
        return outputs

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and _is_telling(func):
            first: Any = result[0] if isinstance(result, tuple | list) and result else result
            if _is_comparable(first):
                self._names.append(func)
                self._results.add(first)
                self._tolerance = max(self._tolerance, _tolerance(first))
        return result

    def difference(self, again: "Observed") -> str:
        """Return in words how a second run differs; empty if it agrees.

        The second run may lack operations, or have others, if a cache outside the block holds their results. Then only outputs count.
        """
        if self._outputs.shapes != again._outputs.shapes:
            return "its output has another shape"
        if self._differing(self._outputs, again._outputs):
            return "its output has other values"
        is_alike = self._names == again._names and self._results.shapes == again._results.shapes
        differing = self._differing(self._results, again._results) if is_alike else []
        return f"{self._names[differing[0]]} returned other values" if differing else ""

    def _differing(self, ours: Projections, others: Projections) -> list[int]:
        """Return the indices of the tensors that differ."""
        shares = ours.differences(others)
        return [index for index, share in enumerate(shares) if not share <= self._tolerance]  # NaN differs


def _is_telling(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return func.namespace == "aten" and not (func.is_view or func._schema.is_mutable or "empty" in name)


def _is_comparable(leaf: Any) -> bool:
    return (
        type(leaf) is Tensor
        and (leaf.is_floating_point() or leaf.is_complex())
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )


def _tolerance(leaf: Tensor) -> float:
    device = leaf.device.type
    if leaf.dtype.itemsize < 4:
        return _HALF
    if leaf.dtype in (torch.float64, torch.complex128):
        return _DOUBLE
    return _SINGLE if device == "cpu" else _SINGLE_ON_DEVICES
