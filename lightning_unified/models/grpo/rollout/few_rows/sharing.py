"""Join small operations into one launch.

They are the products for queries, keys and values, for both halves of a gated layer, and their adapters.
"""

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

__all__ = ["join_calls", "joining"]

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

    The joined call stands at the place of the first. Calls that need other calls' results, which come later, stay.
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
    if any(source.op != "placeholder" for one in late for source in one.all_input_nodes):
        return False
    for one in late:
        first.prepend(one)
    return True


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
