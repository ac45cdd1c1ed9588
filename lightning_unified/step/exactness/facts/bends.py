"""Bends of the loss, as facts: on which side of them the micro-batches of a batch lie.

A loss may bend a mean of the batch: `relu(cost.mean() - limit)`, `kl.mean(0).clamp(min=1)`, `(loss - flood).abs()`, the larger of two
means, or `loss * (2 if loss > 1 else 1)`. A split is exact while all micro-batches lie on one side of every bend, and it is not when
they lie on different sides. No operation is added then, so `facts.graph` does not see it.

`facts.bent_nodes` has the operations, and what is noted of each in every micro-batch.

A fact tells which sides the micro-batches of a batch have, and how their numbers vary:

| the numbers of the micro-batches | for example |
|---|---|
| are equal | the weight of a term |
| are 0 | the same, where a schedule leaves the term out |
| are proportional to the micro-batches' loss terms, or to their rows | the divisor of a sum over rows |
| vary otherwise | a divisor that counts some of the rows |

The class weights of labels have to be proportional to the loss terms. A fact of others holds these weights, so that each change asks for a comparison.

A loss of rows one by one may bend each row's term: that is no mistake, so facts only ask for a comparison.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isclose
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.exactness.facts.bent_nodes import LIMIT, PLACES, figures_of, may_hide
from lightning_unified.step.exactness.facts.graph import GraphFact, graph_near
from lightning_unified.step.exactness.facts.labels import NUMBER, WEIGHED
from lightning_unified.step.exactness.facts.levels import Levels

__all__ = ["NOT_FINITE", "LossBends", "are_mixed", "left_out_before", "variation"]

Fact = tuple[Any, str, Any]

_OF_NO_TERMS: Fact = ("the loss", "bends", ("of no terms", True))
NOT_FINITE: Fact = ("the loss", "bends", ("a gradient that is not finite", True))
"""The gradient of some micro-batch is not finite, although the losses are."""

_ZERO = ("zero", False)
_ROUNDING = 1e-5  # of a quotient of two float32 numbers


def are_mixed(facts: Collection[Fact]) -> bool:
    """Return whether micro-batches differ in operations, sides or numbers, by these facts."""
    return any(value[-1] for _, kind, value in facts if kind == "bends")


def left_out_before(facts: Collection[Fact]) -> frozenset[Fact]:
    """Return the facts of batches with a number of 0 in the place of a number that is not, by these facts."""
    own = [fact for fact in facts if fact[1] == "bends" and len(fact[2]) > 2 and fact[2][2].endswith(NUMBER)]
    return frozenset((what, kind, (*place[:3], *_ZERO)) for what, kind, place in own if place[3:] != _ZERO)


class LossBends:
    """The graphs, bends and levels of one batch's micro-batches.

    Args:
        levels: The levels of logged and returned numbers in the batches before.

    Attributes:
        may_hide: Whether the loss may be finite where its gradient is not.
        moving: The first micro-batch that has a gradient other than zero; None without one, and where it is not looked for.
        waiting: The micro-batch whose backward pass is still to come; None without one.
    """

    def __init__(self, levels: Levels | None = None) -> None:
        self._levels = levels or Levels()
        self._numbers: list[tuple[str, ...]] = []  # of each micro-batch: names of logged and returned numbers
        self._graphs: list[GraphFact] = []
        self._seen: list[tuple[Any, list[Tensor]]] = []  # of each micro-batch: names of its bends, and their figures
        self._written: Mapping[str, Sequence[Any]] = {}  # numbers of all micro-batches
        self._parameters: Sequence[int] = ()
        self._decided: frozenset[Fact] = frozenset()
        self._lacking: list[int] = []  # micro-batches with a loss of no terms
        self._counts: list[tuple[float, float]] = []  # of each micro-batch: its loss terms and its rows
        self._transfers: list[torch.cuda.Event] = []
        self._is_finite = True
        self.may_hide = False
        self.moving: int | None = None
        self.waiting: int | None = None

    def add(
        self, loss: Tensor, *, rows: int = 1, terms: float = 1.0, numbers: Mapping[str, Tensor] | None = None
    ) -> GraphFact:
        """Note the loss of the next micro-batch before its backward pass, and return the fact about its graph.

        Args:
            loss: The loss.
            rows: The number of rows of the micro-batch.
            terms: The number of its loss terms.
            numbers: Numbers that it logs or returns, by name.
        """
        graph, nodes = graph_near(loss)
        found = list(figures_of(nodes))
        self.may_hide |= may_hide(nodes)
        self._graphs.append(graph)
        self._counts.append((terms, rows))
        others = {} if numbers is None else numbers
        self._numbers.append(tuple(others))
        figures = [*(one for _, one in found), *(one.detach().reshape(1).expand(2) for one in others.values())]
        self._seen.append(((graph, tuple(name for name, _ in found)), self._sent(figures)))
        return graph

    def add_written(self, numbers: Mapping[str, Sequence[Any]]) -> None:
        """Note numbers that the micro-batches have written, by name, after the last micro-batch."""
        self._written = numbers

    def add_parameters(self, places: Sequence[int]) -> None:
        """Note the written parameters, by their places among the trained ones."""
        self._parameters = places

    def add_decided(self, facts: frozenset[Fact]) -> None:
        """Note facts about decisions of the step by values of its rows."""
        self._decided = facts

    def add_lacking(self, index: int) -> None:
        """Note that micro-batch `index` has a loss although it has no loss terms.

        Its loss may be the same for any rows, such as a penalty of weights, or a sum that the step divides by at least 1.
        """
        self._lacking.append(index)

    def add_not_finite(self) -> None:
        """Note that the gradient of some micro-batch is not finite, although the losses are."""
        self._is_finite = False

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

    def moving_rows(self, micro_batches: Sequence[int]) -> range:
        """Return the rows of the first micro-batch that has a gradient, or may get one; none without one."""
        index = self.waiting if self.moving is None else self.moving
        return range(0) if index is None else range(sum(micro_batches[:index]), sum(micro_batches[: index + 1]))

    def mixed_rows(self, facts: Collection[Fact], micro_batches: Sequence[int]) -> range:
        """Return the rows of the micro-batch that lies on both sides of most of the bends in `facts`.

        No rows if none lies on both sides of one of them.

        Args:
            facts: Facts about this batch.
            micro_batches: The rows of each micro-batch.
        """
        if NOT_FINITE in facts:
            return range(sum(micro_batches))
        if _OF_NO_TERMS in facts:
            return range(sum(micro_batches[: self._lacking[0]]), sum(micro_batches[: self._lacking[0] + 1]))
        places: dict[Any, set[int]] = {}
        for fact in facts:
            if fact[1] == "bends" and len(fact[2]) > 2:  # else of micro-batches with different graphs
                graph, place, *_ = fact[2]
                places.setdefault(graph, set()).add(place)
        numbers = [
            sum(low < high for place, (low, high) in enumerate(figures) if place in places.get(graph, ()))
            for (graph, _), figures in zip((key for key, _ in self._seen), self._on_host(), strict=True)
        ]
        if not any(numbers):
            return range(0)
        index = numbers.index(max(numbers))
        return range(sum(micro_batches[:index]), sum(micro_batches[: index + 1]))

    def facts(self) -> frozenset[Fact]:
        """Return the facts about the batch, after the figures of all micro-batches are on the host."""
        facts: set[Fact] = set(self._graphs)
        alike: dict[Any, list[int]] = {}
        for index, (key, _) in enumerate(self._seen):
            alike.setdefault(key, []).append(index)
        if len(alike) > 1:
            facts.add(("the loss", "bends", (frozenset(alike), True)))
        figures = self._on_host()
        for (graph, names), indices in alike.items():
            counts = [self._counts[index] for index in indices]
            columns = zip(*(figures[index][: len(names)] for index in indices), strict=True)
            for place, (name, values) in enumerate(zip(names, columns, strict=True)):
                if (noted := _noted(name, values, counts)) is not None:
                    facts.add(("the loss", "bends", (graph, place, name, *noted)))
        facts.update([_OF_NO_TERMS] if self._lacking else [])
        facts.update([] if self._is_finite else [NOT_FINITE])
        facts.update(("the step", "writes a parameter", place) for place in self._parameters)
        return frozenset({*facts, *self._facts_of_numbers(figures), *self._decided})

    def _facts_of_numbers(self, figures: Sequence[Sequence[tuple[float, ...]]]) -> Iterator[Fact]:
        """Yield facts about the numbers that all micro-batches log or return."""
        found = {name: list(map(float, values)) for name, values in self._written.items()}
        for names, own in zip(self._numbers, figures, strict=True):
            for name, (number, _) in zip(names, own[len(own) - len(names) :], strict=True):
                found.setdefault(name, []).append(number)
        for name, numbers in found.items():
            if len(numbers) == len(figures) and (level := self._levels.of(name, numbers, self._counts)) is not None:
                yield name, "bends", (level, True)

    def _on_host(self) -> list[list[tuple[float, ...]]]:
        """Return the figures of each micro-batch as numbers, after their transfers have ended."""
        for transfer in self._transfers:
            transfer.synchronize()
        figures = _on_host([one for _, entries in self._seen for one in entries])
        return [[next(figures) for _ in entries] for _, entries in self._seen]


def _noted(
    name: str, values: Sequence[tuple[float, ...]], counts: Sequence[tuple[float, float]]
) -> tuple[Any, bool] | None:
    """Return what a fact tells of one bend, and whether micro-batches differ; or None.

    Args:
        name: The name of the bend.
        values: Its two figures in each micro-batch.
        counts: The loss terms and the rows of each micro-batch.
    """
    sides = frozenset(values)
    if name.endswith(WEIGHED):
        is_counted = _are_proportional([total for total, _ in values], [terms for terms, _ in counts])
        return ("terms", False) if is_counted else (("other weights", values[0][1]), True)
    if name.endswith(NUMBER):
        kind = variation(values, counts)
        return _ZERO if kind == "equal" and not any(values[0]) else (kind, kind != "equal")
    if name.endswith(PLACES):  # rows one by one have other sides at each place
        return ("apart", True) if len(sides) > 1 else None
    if name.endswith(LIMIT):
        return ("sum", True) if _sum_crosses(values) else None
    return sides, len(sides) > 1


def variation(values: Sequence[tuple[float, ...]], counts: Sequence[tuple[float, float]]) -> str:
    """Return what numbers are proportional to: equal, terms or rows; else apart."""
    if len({*values}) == 1:
        return "equal"
    for which, kind in enumerate(("terms", "rows")):
        of_one = [(number, count[which]) for each, count in zip(values, counts, strict=True) for number in each]
        if _are_equal([number / count for number, count in of_one if count]) or _are_equal(
            [number * count for number, count in of_one]
        ):
            return kind
    return "apart"


def _are_proportional(numbers: Sequence[float], terms: Sequence[float]) -> bool:
    return all(
        isclose(one * sum(terms), count * sum(numbers), rel_tol=_ROUNDING)
        for one, count in zip(numbers, terms, strict=True)
    )


def _are_equal(numbers: Sequence[float]) -> bool:
    return all(isclose(one, numbers[0], rel_tol=_ROUNDING) for one in numbers)


def _sum_crosses(values: Sequence[tuple[float, ...]]) -> bool:
    """Return whether the sum of values lies on another side of a limit than all of them.

    Each value has its limit beside it. Limits that differ are sums themselves.
    """
    sides = {value > limit for value, limit in values}
    limits = {limit for _, limit in values}
    limit = sum(limit for _, limit in values) if len(limits) > 1 else limits.pop()
    return len(sides) == 1 and (sum(value for value, _ in values) > limit) not in sides


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
