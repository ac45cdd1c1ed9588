"""Join small operations into one launch.

They are the products for queries, keys and values, for both halves of a gated layer, and their adapters.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

__all__ = ["join_calls", "joining"]

_IN_PLACE = {
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ior,
    operator.iand,
}
_MOST = 6  # judgement: tensors that one launch computes; each is a branch of the kernel


@cache  # torch compiles anew for another backend object
def joining(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler backend that joins calls before it calls `backend`."""

    def compile_joined(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        join_calls(module.graph)
        module.recompile()
        return backend(module, inputs)

    return compile_joined


def join_calls(graph: fx.Graph) -> None:
    """Replace calls of `products` with the same input by one, and calls of `add_adapters`.

    The joined call stands at the place of the first. Calls stay that need results which come later, or follow an operation in place, which
    may have changed what they read.
    """
    operators = torch.ops.lightning_unified
    for target in (operators.products_of_few_rows.default, operators.add_adapters.default):
        waiting = [node for node in graph.nodes if node.op == "call_function" and node.target is target]
        while waiting:
            first, *others = waiting
            taken, size = [first], _size(first)
            for call in others:
                if size + _size(call) <= _MOST and _shared(call) == _shared(first) and _can_be_at(call, first):
                    taken.append(call)
                    size += _size(call)
            if len(taken) > 1:
                _join(graph, taken)
            waiting = [call for call in others if call not in taken]


def _arguments(call: fx.Node) -> tuple[Any, ...]:
    return call.args


def _size(call: fx.Node) -> int:
    return len(_arguments(call)[1])


def _shared(call: fx.Node) -> list[Any]:
    """Return the arguments that all tensors of a call have in common: the input of products."""
    return [one for one in _arguments(call) if not isinstance(one, Sequence)]


def _can_be_at(call: fx.Node, first: fx.Node) -> bool:
    """Return whether a call can stand at the place of another one.

    Casts of the graph's inputs move there.
    """
    late = [one for one in call.all_input_nodes if not one < first]
    if not all(_is_cast_of_input(one) for one in late) or any(map(_writes, _between(first, call))):
        return False
    for one in late:
        first.prepend(one)
    return True


def _is_cast_of_input(node: fx.Node) -> bool:
    is_cast = node.op == "call_method" and node.target == "to"
    return is_cast and all(source.op == "placeholder" for source in node.all_input_nodes)


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _writes(node: fx.Node) -> bool:
    """Return whether a node writes a tensor in place, as far as its name or its schema tells."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return node.op.startswith("call") and (is_in_place or node.target in _IN_PLACE or "out" in node.kwargs)


def _join(graph: fx.Graph, calls: list[fx.Node]) -> None:
    target: Any = calls[0].target
    arguments = [
        [one for call in calls for one in _arguments(call)[place]] if isinstance(argument, Sequence) else argument
        for place, argument in enumerate(_arguments(calls[0]))
    ]
    with graph.inserting_before(calls[0]):
        whole = graph.call_function(target, tuple(arguments))
        count = sum(map(_size, calls))
        results = iter([graph.call_function(operator.getitem, (whole, place)) for place in range(count)])
    for call in calls:
        own = [next(results) for _ in range(_size(call))]
        for user in list(call.users):
            assert user.target is operator.getitem, f"{call} is used as a list by {user}"
            user.replace_all_uses_with(own[_arguments(user)[1]])
            graph.erase_node(user)
        graph.erase_node(call)
