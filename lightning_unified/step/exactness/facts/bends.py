"""Bends of the loss, as facts: on which side of them the micro-batches of a batch lie.

A loss may bend a mean of the batch: `relu(cost.mean() - limit)`, `kl.mean(0).clamp(min=1)`, `(loss - flood).abs()`, the larger of two
means, or `loss * (2 if loss > 1 else 1)`. A split is exact while all micro-batches lie on one side of every bend, and it is not when
they lie on different sides. No operation is added then, so `facts.graph` does not see it.

| operation near the loss | what is noted of each micro-batch |
|---|---|
| relu, abs, clamp, hardtanh, threshold, smooth L1 and Huber losses, maximum, minimum, where | the sides on which its entries lie |
| the largest or smallest of a few values | which one it is |
| multiplication by a number, or division | the number |

A fact tells which sides the micro-batches of a batch have, and whether their numbers are equal. A loss of rows one by one may bend
each row's term: that is no mistake, so facts only ask for a comparison.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.exactness.facts.graph import GraphFact, graph_near

__all__ = ["LossBends"]

_MOST = 4096  # entries of a bent tensor; larger ones hold positions of rows, not means over rows
_FEW = 16  # values of which the largest is taken, such as the losses of some tasks

Fact = tuple[str, str, Any]


class LossBends:
    """The graphs and bends of the losses of one batch's micro-batches."""

    def __init__(self) -> None:
        self._graphs: list[GraphFact] = []
        self._seen: list[tuple[Any, list[Tensor]]] = []  # of each micro-batch: names of its bends, and their figures
        self._transfers: list[torch.cuda.Event] = []

    def add(self, loss: Tensor) -> GraphFact:
        """Note the loss of the next micro-batch before its backward pass, and return the fact about its graph."""
        graph, nodes = graph_near(loss)
        found = list(_figures_of(nodes))
        self._graphs.append(graph)
        self._seen.append(((graph, tuple(name for name, _ in found)), self._sent([one for _, one in found])))
        return graph

    def _sent(self, figures: list[Tensor]) -> list[Tensor]:
        """Begin the transfer of figures on a CUDA device to the host, and return all figures.

        The transfer ends before the backward pass begins. So `facts` waits for the last forward pass only, and the device has the backward pass
        to do.
        """
        moving = [index for index, one in enumerate(figures) if one.is_cuda]
        if not moving:
            return figures
        sent, found = torch.stack([figures[index].float() for index in moving]), [*figures]
        done = torch.cuda.Event()
        for index, one in zip(moving, sent.to("cpu", non_blocking=True), strict=True):
            found[index] = one
        done.record(torch.cuda.current_stream(sent.device))
        self._transfers.append(done)
        return found

    @property
    def is_mixed(self) -> bool:
        """Whether micro-batches differ: in operations, in sides of a bend, or in numbers."""
        return any(value[-1] for _, kind, value in self.facts() if kind == "bends")

    def facts(self) -> frozenset[Fact]:
        """Return the facts about the batch, after the figures of all micro-batches are on the host."""
        for transfer in self._transfers:
            transfer.synchronize()
        facts: set[Fact] = set(self._graphs)
        if len(facts) > 1:
            facts.add(("the loss", "bends", (frozenset(self._graphs), True)))
        figures = _on_host([one for _, entries in self._seen for one in entries])
        alike: dict[Any, list[list[tuple[float, ...]]]] = {}
        for key, entries in self._seen:
            alike.setdefault(key, []).append([next(figures) for _ in entries])
        for (graph, names), of_micro_batches in alike.items():
            for place, (name, values) in enumerate(zip(names, zip(*of_micro_batches, strict=True), strict=True)):
                sides = frozenset(values)
                noted = None if name.endswith(_NUMBER) else sides
                facts.add(("the loss", "bends", (graph, place, noted, len(sides) > 1)))
        return frozenset(facts)


_NUMBER = " by a number"


def _figures_of(nodes: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each bend, and two figures: its lowest and highest side, or a number twice."""
    for node in nodes:
        name = node.name()
        with suppress(RuntimeError):  # a saved tensor was written in place, or is freed
            operand = _number_of(node, name)
            if operand is not None:
                yield name + _NUMBER, operand.reshape(1).expand(2)
            elif name in _SIDES:
                sides = _SIDES[name](node)
                if sides is not None and 0 < sides.numel() <= _MOST:
                    yield name, torch.stack(torch.aminmax(sides))


def _number_of(node: Any, name: str) -> Tensor | None:
    """Return the number by which a node multiplies or divides a loss, where it has no gradient itself."""
    if name not in ("MulBackward0", "DivBackward0"):
        return None
    first, second = (before for before, _ in node.next_functions)
    which = "other" if second is None else "self" if first is None and name == "MulBackward0" else None
    number = None if which is None else _saved(node, which)
    return number if isinstance(number, Tensor) and number.numel() == 1 and not number.is_complex() else None


def _saved(node: Any, name: str) -> Any:
    """Return a value that a node keeps for its backward pass; None where a hook would compute it again."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is not None and getattr(raw, "unpack_hook", raw) is not None:
        return None
    value = getattr(node, f"_saved_{name}", None)
    return value.detach() if isinstance(value, Tensor) else value


def _between(low: str, high: str, node: Any) -> Tensor | None:
    """Return whether each entry is below a range, in it or above it."""
    value = _saved(node, "self")
    if not isinstance(value, Tensor) or value.numel() > _MOST:
        return None
    sides = torch.zeros_like(value, dtype=torch.float32)
    for limit, side in ((_saved(node, low), -1.0), (_saved(node, high), 1.0)):
        if limit is not None:
            sides = torch.where(value < limit if side < 0 else value > limit, side, sides)
    return sides


def _above(name: str, limit: str | None = None) -> Callable[[Any], Tensor | None]:
    def sides(node: Any) -> Tensor | None:
        value, over = _saved(node, name), 0.0 if limit is None else _saved(node, limit)
        if not isinstance(value, Tensor) or value.numel() > _MOST or over is None:
            return None
        return (value > over).float()

    return sides


def _far(limit: str) -> Callable[[Any], Tensor | None]:
    def sides(node: Any) -> Tensor | None:
        value, target = _saved(node, "self"), _saved(node, "target")
        if not (isinstance(value, Tensor) and isinstance(target, Tensor)) or value.numel() > _MOST:
            return None
        off = value - target
        return (off > _saved(node, limit)).float() - (off < -_saved(node, limit)).float()

    return sides


def _chosen(node: Any) -> Tensor | None:
    value, best = _saved(node, "self"), _saved(node, "result")
    if not (isinstance(value, Tensor) and isinstance(best, Tensor)) or value.numel() > _FEW or best.numel() != 1:
        return None
    return (value == best).reshape(-1).float().argmax().float()


def _place(node: Any) -> Tensor | None:
    places = _saved(node, "indices")
    return places.float() if isinstance(places, Tensor) and places.numel() == 1 else None


def _condition(node: Any) -> Tensor | None:
    condition = _saved(node, "condition")
    return condition.float() if isinstance(condition, Tensor) and condition.numel() <= _MOST else None


_SIDES: dict[str, Callable[[Any], Tensor | None]] = {
    "ReluBackward0": _above("result"),
    "LeakyReluBackward0": _above("self"),
    "AbsBackward0": _above("self"),
    "ThresholdBackward0": _above("self", "threshold"),
    "ClampBackward0": lambda node: _between("min", "max", node),
    "ClampBackward1": lambda node: _between("min", "max", node),
    "ClampMinBackward0": lambda node: _between("min", "max", node),
    "ClampMaxBackward0": lambda node: _between("min", "max", node),
    "HardtanhBackward0": lambda node: _between("min_val", "max_val", node),
    "MaximumBackward0": _above("self", "other"),
    "MinimumBackward0": _above("self", "other"),
    "WhereBackward0": _condition,
    "MaxBackward0": _place,
    "MinBackward0": _place,
    "MaxBackward1": _chosen,
    "MinBackward1": _chosen,
    "AmaxBackward0": _chosen,
    "AminBackward0": _chosen,
    "SmoothL1LossBackward0": _far("beta"),
    "HuberLossBackward0": _far("delta"),
}


def _on_host(figures: list[Tensor]) -> Iterator[tuple[float, ...]]:
    """Return pairs of figures as numbers, with one transfer from each device."""
    places: dict[torch.device, list[int]] = {}
    for index, one in enumerate(figures):
        places.setdefault(one.device, []).append(index)
    found: dict[int, tuple[float, ...]] = {}
    for indices in places.values():
        pairs = torch.stack([figures[index].float() for index in indices]).tolist()
        found.update(zip(indices, map(tuple, pairs), strict=True))
    return (found[index] for index in range(len(figures)))
