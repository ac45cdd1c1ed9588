"""The operations near the loss, as a fact: a term of the loss that is switched on shows there."""

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["GraphFact", "graph_fact", "graph_near", "stop_gradients", "stop_nodes"]

GraphFact = tuple[str, str, int]

_NODES = 64  # judgement: terms are added near the loss, and reading so many nodes takes less than 0.1 ms


def graph_fact(loss: Tensor) -> GraphFact:
    """Return a fact about the 64 nodes of autograd's graph that are nearest to a loss.

    It holds their names and their connections, but no values or shapes. So it is the same for batches of other sizes, and in other processes.
    """
    return graph_near(loss)[0]


def graph_near(loss: Tensor) -> tuple[GraphFact, list[Any]]:
    """Return the fact about the nodes nearest to a loss, and these nodes, the nearest first."""
    nodes: list[Any] = []
    found: list[tuple[str, tuple[int, ...]]] = []
    waiting, numbers = deque([loss.grad_fn]), {loss.grad_fn: 0}
    while waiting and len(found) < _NODES:
        node = waiting.popleft()
        if node is None:
            continue
        following = [before for before, _ in node.next_functions]
        for before in following:
            if before not in numbers:
                numbers[before] = len(numbers)
                waiting.append(before)
        nodes.append(node)
        found.append((node.name(), tuple(numbers[before] for before in following)))
    return ("the loss", "graph", zlib.crc32(repr(found).encode())), nodes


def stop_gradients(loss: Tensor) -> None:
    """Let the backward pass of a loss without terms run with gradients of zero.

    Such a loss may be 0 / 0, whose gradient is not finite even where it is multiplied by zero. The division is near the loss.
    """
    stop_nodes(graph_near(loss)[1])


def stop_nodes(nodes: Iterable[Any]) -> None:
    """Let no other gradient than zero leave nodes of autograd's graph."""
    for node in nodes:
        node.register_hook(_zeros)


def _zeros(into: tuple[Tensor | None, ...], _out_of: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else _zero(one) for one in into)


def _zero(gradient: Tensor) -> Tensor:
    """Return zeros like a gradient.

    A sparse one keeps its indices: optimizers for sparse gradients update these rows.
    """
    if gradient.layout != torch.sparse_coo:
        return torch.zeros_like(gradient)
    whole = gradient.clone().coalesce()
    whole.values().zero_()
    return whole
