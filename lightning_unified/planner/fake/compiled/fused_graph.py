"""Run a compiler's graph on fake tensors; only stored tensors of compiled code take memory."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from lightning_unified.planner.fake.compiled.kernels import Kernel, kernels_of
from lightning_unified.planner.fake.compiled.operations import is_view
from lightning_unified.planner.fake.compiled.order import ordered
from lightning_unified.planner.fake.compiled.reuse import memory_kept, overwritten
from lightning_unified.planner.fake.recorder import Recorder

__all__ = ["FusedGraph"]


class FusedGraph:
    """Run a graph's kernels one by one; the recorder sees the memory of compiled code.

    The recorder sees each library call. Of a fused kernel, its stored results are noted. A result reuses the memory of an input of the same
    size whose life ends there and which no other result of the kernel reads, as the compiler's buffers do. The memory of other tensors may
    be kept for a later result (`memory_kept`).

    Args:
        module: The graph, with decomposed operations.
        recorder: Notes operations and allocations.
    """

    _boxed_call = True  # torch hands over the only references to saved tensors, in a list to be emptied

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        self._module, self._recorder = module, recorder
        self._inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        *_, self._output = module.graph.nodes
        kernels, self._returned = kernels_of(module.graph)
        self._kernels = ordered(kernels, self._returned)
        self._results = {result for kernel in kernels for result in kernel.results}
        self._ends = self._last_uses()
        kept = memory_kept(self._kernels, self._returned, ends=self._ends)
        self._kept, self._given = set(kept), {result: one for one, result in kept.items()}
        self._views = {node for node in module.graph.nodes if is_view(node) and node not in self._results}

    def _last_uses(self) -> list[list[fx.Node]]:
        """Return the stored tensors that end with each kernel; the last list is of unused inputs."""
        last = dict.fromkeys(self._inputs, -1)
        for index, kernel in enumerate(self._kernels):
            last |= dict.fromkeys(kernel.sources, index) | dict.fromkeys(kernel.results, index)
        ends: list[list[fx.Node]] = [[] for _ in range(len(self._kernels) + 1)]
        for tensor, index in last.items():
            if tensor not in self._returned:
                ends[index].append(tensor)
        return ends

    def __call__(self, given: list[Any]) -> Any:
        """Return the graph's outputs; the list of inputs is emptied."""
        self._recorder.note_compiled_call()
        values: dict[fx.Node, Any] = dict(zip(self._inputs, given, strict=True))
        given.clear()
        for unused in self._ends[-1]:
            values.pop(unused, None)
        with torch._C.DisableTorchFunction():  # the graph's operations are those of the backend already
            for kernel, ending in zip(self._kernels, self._ends, strict=False):
                if kernel.is_fused:
                    self._store(kernel, values, ending)
                else:
                    self._call(kernel, values)
                for one in ending:
                    if one not in self._kept:
                        values.pop(one, None)
            return map_arg(self._output.args[0], lambda node: self._value(node, values))

    def _call(self, kernel: Kernel, values: dict[fx.Node, Any]) -> None:
        """Run a library call, which the recorder sees."""
        (node,) = kernel.nodes
        for one in node.all_input_nodes:
            self._value(one, values)
        self._hand_over(kernel, values)
        result = _run(node, values)
        self._drop_views(values)
        if kernel.results == [node]:
            values[node] = result
        else:  # each tensor of several has a life of its own
            values |= {item: result[item.args[1]] for item in kernel.results}

    def _store(self, kernel: Kernel, values: dict[fx.Node, Any], ending: Sequence[fx.Node]) -> None:
        """Run a fused kernel, whose results are noted."""
        read = _bytes(values[one] for one in kernel.sources if one in values)
        with self._recorder.paused(paused=True):
            for node in kernel.nodes:
                values[node] = self._result(node, values)
        self._drop_views(values)
        self._hand_over(kernel, values)
        for one in overwritten(kernel, ending):
            values.pop(one, None)
        results = [values[node] for node in kernel.nodes if node not in ending]  # others stay inside the kernel
        self._recorder.note_fused(list(_tensors(results)), moved=read + _bytes(results))

    def _hand_over(self, kernel: Kernel, values: dict[fx.Node, Any]) -> None:
        """Free the memory that was kept for the kernel's results, right before they are noted."""
        for result in kernel.results:
            if result in self._given:
                values.pop(self._given[result], None)

    def _result(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Return a stored result of a fused kernel.

        It is made without the operations that the kernel fuses, where the graph gives its layout.
        """
        known = node.meta.get("val")
        if type(known) is FakeTensor and not is_view(node):
            return torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device=known.device)
        for one in node.all_input_nodes:
            self._value(one, values)
        return _run(node, values)

    def _drop_views(self, values: dict[fx.Node, Any]) -> None:
        """Drop views, which would keep their tensor alive; they are made again where they are needed."""
        for node in self._views.intersection(values):
            values.pop(node)

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Return the value of a node; operations inside kernels run when a kernel needs them."""
        waiting = [node]
        with self._recorder.paused(paused=True):
            while waiting:
                one = waiting[-1]
                missing = [] if one in values else [each for each in one.all_input_nodes if each not in values]
                if missing:
                    waiting += missing
                    continue
                waiting.pop()
                if one not in values:
                    is_constant = one.op == "get_attr"
                    values[one] = _attribute(self._module, str(one.target)) if is_constant else _run(one, values)
        return values[node]


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


def _bytes(values: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(values))


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor))
