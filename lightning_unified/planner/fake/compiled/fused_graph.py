"""Run a compiler's graph on fake tensors; only stored tensors of compiled code take memory.

torch's compiler fuses element-wise operations, reductions and copies into kernels. A result inside a kernel takes no memory. A result is
stored if another kernel needs it: matrix products, attention and other library calls read stored tensors only.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from lightning_unified.planner.fake.recorder import Recorder

__all__ = ["FusedGraph"]

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


class FusedGraph:
    """Run a graph's operations one by one; the recorder sees the memory of compiled code.

    The recorder does not see a fused operation. Its result is noted where the compiler stores it. A stored result reuses the memory of an
    input of the same size whose life ends there, as the compiler's buffers do. The recorder sees each operation that is not fused.

    Args:
        module: The graph, with decomposed operations.
        recorder: Notes operations and allocations.
    """

    _boxed_call = True  # torch hands over the only references to saved tensors, in a list to be emptied

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        self._module, self._recorder = module, recorder
        self._nodes = list(module.graph.nodes)
        self._fused = {node for node in self._nodes if _is_fusible(node)}
        self._stored = {node for node in self._nodes if self._is_stored(node)}
        self._ends = self._last_uses()

    def _is_stored(self, node: fx.Node) -> bool:
        """Return whether compiled code stores the result of a fused operation."""
        if node not in self._fused or _is_view(node):
            return False
        return _name(node) in _REDUCTIONS or self._is_read(node)

    def _is_read(self, node: fx.Node) -> bool:
        """Return whether the output or an unfused operation reads the result or a view of it."""
        return any(user not in self._fused or (_is_view(user) and self._is_read(user)) for user in node.users)

    def _last_uses(self) -> list[list[fx.Node]]:
        """Return, for each position, the nodes whose results end there.

        A fused operation reads its inputs where its result is stored at last, or used.
        """
        at = {node: index for index, node in enumerate(self._nodes)}
        last: dict[fx.Node, int] = {}
        for node in reversed(self._nodes):
            uses = [at[user] if user in self._stored or user not in self._fused else last[user] for user in node.users]
            last[node] = max([at[node], *uses])
        ends: list[list[fx.Node]] = [[] for _ in self._nodes]
        for node, index in last.items():
            ends[index].append(node)
        return ends

    def __call__(self, given: list[Any]) -> Any:
        """Return the graph's outputs; the list of inputs is emptied."""
        values: dict[fx.Node, Any] = {}
        inputs = given[::-1]
        given.clear()
        for index, node in enumerate(self._nodes):
            if node.op == "placeholder":
                values[node] = inputs.pop()
            elif node.op == "get_attr":
                values[node] = _attribute(self._module, str(node.target))
            elif node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            elif node in self._stored:
                self._store(node, values, self._ends[index])
            else:
                with self._recorder.paused(paused=node in self._fused):
                    values[node] = _run(node, values)
            for one in self._ends[index]:
                values.pop(one, None)
        raise AssertionError("a graph ends with its output")

    def _store(self, node: fx.Node, values: dict[fx.Node, Any], ending: Sequence[fx.Node]) -> None:
        """Run a fused operation whose result is stored."""
        with self._recorder.paused(paused=True):
            result = _run(node, values)
        sources = [values[one] for one in self._sources(node) if one in values]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in _tensors((*sources, result)))
        sizes = {tensor.untyped_storage().nbytes() for tensor in _tensors([result])}
        sources.clear()
        for one in ending:  # its memory may be used again for this result
            if one is not node and _sizes(values.get(one)) <= sizes:
                values.pop(one, None)
        self._recorder.note_fused(list(_tensors([result])), moved=moved)
        values[node] = result

    def _sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """Yield the stored tensors that a kernel reads to compute the result."""
        seen: set[fx.Node] = set()
        waiting = list(node.all_input_nodes)
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in self._fused and one not in self._stored:
                waiting += one.all_input_nodes
            else:
                yield one


def _is_fusible(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_fusible(source)
    if not isinstance(node.target, torch._ops.OpOverload):
        return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("val")))
    if _is_view(node) or torch.Tag.pointwise in node.target.tags:
        return True
    return _name(node) in _REDUCTIONS or _name(node) in _COPIES or _name(node) in _CREATED or _fills_constant(node)


def _fills_constant(node: fx.Node) -> bool:
    """Return whether the operation writes one value at some entries of a constant tensor.

    The compiler turns it into a choice by index: the gradient of a loss by class is made so.
    """
    base, *_, value = node.args or (None, None)
    is_constant = isinstance(base, fx.Node) and _name(base) in {"full", "zeros_like", "full_like", "zeros"}
    return _name(node) == "scatter" and is_constant and isinstance(value, (int, float))


def _is_view(node: fx.Node) -> bool:
    """Return whether the result shares the memory of an input."""
    if node.target is operator.getitem:
        return True
    return bool(getattr(node.target, "is_view", False)) or _name(node) in {"_unsafe_view", "_reshape_alias"}


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    assert callable(node.target)
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    # a graph that runs a kernel twice keeps the generator's state for it, a few bytes
    if getattr(node.target, "__name__", "") == "run_and_save_rng_state":
        return torch.empty(16, dtype=torch.uint8), args[0](*args[1:], **kwargs)
    if getattr(node.target, "__name__", "") == "run_with_rng_state":
        return args[1](*args[2:], **kwargs)
    return node.target(*args, **kwargs)


def _attribute(module: fx.GraphModule, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor))


def _sizes(value: Any) -> set[int]:
    return {tensor.untyped_storage().nbytes() for tensor in _tensors([value])}
