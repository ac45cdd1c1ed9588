"""Multiply the gradient that flows into each summand of a loss by a factor of its own."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from lightning_unified.step.exactness.facts.graph import stop_nodes
from lightning_unified.step.exactness.losses.summands.tree import LEAF, WHOLE, Summand

__all__ = ["scale_summands"]

_NODES = 64  # of a summand without terms, such as 0 / 0: the division is near the loss


def scale_summands(summands: Sequence[Summand], factors: Sequence[float]) -> None:
    """Let the next backward pass multiply the gradient of each summand by its factor.

    A summand with the factor 0 may be 0 / 0, whose gradient is not finite even where it is multiplied by zero. So no other gradient than
    zero leaves the operations near it, except for those that other summands share.

    Args:
        summands: The summands of a loss.
        factors: One for each.
    """
    places: dict[Any, dict[int, float]] = {}
    for one, factor in zip(summands, factors, strict=True):
        for node, index in one.places:
            places.setdefault(node, {})[index] = factor
    for node, own in places.items():
        if WHOLE in own:
            node.register_prehook(partial(_scaled, {0: own.pop(WHOLE)}))
        if own:
            node.register_hook(partial(_scaled, own))
    lacking = [node for one, factor in zip(summands, factors, strict=True) if factor == 0 for node in one.nodes]
    if lacking:
        others = [node for one, factor in zip(summands, factors, strict=True) if factor for node in one.nodes]
        stop_nodes(_apart(lacking, others))


def _scaled(
    factors: Mapping[int, float], into: tuple[Tensor | None, ...], _out_of: tuple[Tensor | None, ...] = ()
) -> tuple[Tensor | None, ...]:
    return tuple(one if one is None or index not in factors else one * factors[index] for index, one in enumerate(into))


def _apart(nodes: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the nodes near `nodes` that gradients of `others` do not reach."""
    near = list(islice((one for one in _before(nodes, since=0) if one.name() != LEAF), _NODES))
    # a node is made after those before it, so older nodes than these lead to none of them
    since = min((one._sequence_nr() for one in near), default=0)
    reached = {*_before(others, since=since)}
    return [one for one in near if one not in reached]


def _before(nodes: Iterable[Any], *, since: int) -> Iterator[Any]:
    """Yield `nodes` and all nodes before them that were made since a number, the nearest first."""
    waiting = deque(nodes)
    seen = {*waiting}
    while waiting:
        node = waiting.popleft()
        if node._sequence_nr() < since:
            continue
        yield node
        found = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(found)
        waiting.extend(found)
