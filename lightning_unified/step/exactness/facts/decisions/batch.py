"""Facts about the decisions of a batch's micro-batches.

A step may decide by a figure of its rows how it computes: `if x.mean() > limit: x = x - x.mean(0)`, `x * min(1, limit / float(x.norm()))`.
Figures of inputs and labels have no gradient, so autograd's graph does not hold them; and operations far from the loss are not read there.
The split is exact until micro-batches come that decide otherwise.

| noted of each micro-batch | for example |
|---|---|
| the places of the user's code that call an operation of torch | `x - x.mean(0)`, `self.head(x)` |
| on which side of a limit a few values lie | `x.mean() > limit`, `bool(mask.any())`, `x.max().clamp(min=2)` |
| numbers of Python that an operation gets, and rounded values | `x * scale`, `x.max().floor()` |

Facts tell how the micro-batches of a batch agree in each of them, and whether the sum of their values lies on another side. Noting takes 5
to 9 µs for each operation, so it begins once a check has seen that the step reads or compares values of tensors, or keeps state. The code of
widely used libraries of models does not count, of which the tests try many.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_unified.nn.compiled import COMPILED_CALL, is_compiled
from lightning_unified.step.exactness.facts.bends import variation
from lightning_unified.step.exactness.facts.decisions.noting import BESIDE, STEPS, Decided, Name, NoteDecisions

__all__ = ["BatchDecisions", "Decisions"]

Fact = tuple[Any, str, Any]
Limited = tuple[list[float], list[float]]

_FROM_LIMIT = {"ge", "lt", "greater_equal", "less"}  # the limit itself is on the upper side
_AT_LIMIT = {"eq", "ne", "not_equal"}


class Decisions:
    """The places that the micro-batches of a fit have run so far, and whether their decisions are noted.

    Args:
        module: The module. Nothing is noted if it has compiled parts, which torch would compile anew for the mode, or CUDA graphs, which are
            not replayed inside one.
        decides: Whether its steps are known to decide by values, or nothing else tells how they compute.
    """

    def __init__(self, module: nn.Module, *, decides: bool = False) -> None:
        self._module, self._decides, self._knows_backward = module, decides, False
        self._known: set[Name] = set()
        self._whole: set[Name] = set()  # places that all micro-batches of a batch have run

    @property
    def are_noted(self) -> bool:
        """Whether the decisions of micro-batches are noted."""
        return self._decides and self._may_be_noted

    def note_from_now_on(self) -> None:
        """Note the decisions of the next batches, as of a step that may decide by state that it keeps."""
        self._decides = True

    @property
    def _may_be_noted(self) -> bool:
        children = self._module.modules()
        return not any(is_compiled(child) or vars(child).get(COMPILED_CALL) is not None for child in children)

    def watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step for checks: its runs tell whether it decides by values."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._decides or not self._may_be_noted:
                return step(*args, **kwargs)
            with NoteDecisions(None) as mode:
                result = step(*args, **kwargs)
            self._decides = mode.reads
            return result

        return run

    @contextmanager
    def watching_backward(self) -> Iterator[None]:
        """Tell whether the module's own `backward` decides by values, in the first backward pass."""
        if self._decides or self._knows_backward or not self._may_be_noted:
            yield
            return
        with NoteDecisions(None) as mode:
            yield
        self._knows_backward, self._decides = True, mode.reads

    def sides_of_places(self, micro_batches: Sequence[set[Name]]) -> Iterator[tuple[Name, str]]:
        """Yield the places that not all micro-batches of all batches run, with those of this batch that do.

        No batch before ran a new place; so it is known too how they agree without it.
        """
        some, every = set[Name]().union(*micro_batches), set[Name].intersection(*micro_batches)
        for place in (self._known | some) - (self._whole & every):
            yield place, "all" if place in every else "some" if place in some else "none"
        if self._known:
            yield from ((place, "none") for place in some - self._known)
        self._known |= some
        self._whole |= every


class BatchDecisions:
    """The decisions of one batch's micro-batches.

    Args:
        decisions: Those of the batches before.
    """

    def __init__(self, decisions: Decisions) -> None:
        self._decisions, self._are_noted = decisions, decisions.are_noted
        self._decided: list[Decided] = []

    def run(self, index: int, step: Callable[[], Any]) -> Any:
        """Run the step of micro-batch `index`, and note its decisions."""
        if not self._are_noted:
            return step()
        decided = Decided()
        with NoteDecisions(decided):
            result = step()
        decided.send()
        self._decided[index:] = [decided]
        return result

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Note the decisions of the module's own `backward` for the last micro-batch.

        Gradient hooks run outside of the mode.
        """
        if not self._are_noted:
            with self._decisions.watching_backward():
                yield
            return
        with NoteDecisions(self._decided[-1]):
            yield
        self._decided[-1].send()

    def facts(self, counts: Sequence[tuple[float, float]]) -> frozenset[Fact]:
        """Return the facts about all micro-batches.

        Args:
            counts: The loss terms and the rows of each micro-batch.
        """
        decided = self._decided
        if len(decided) != len(counts):
            return frozenset()
        facts: set[Fact] = set()
        for place, who in self._decisions.sides_of_places([one.places for one in decided]):
            facts.add((place, "bends", (who, who == "some")))
        limits = [one.arrived() for one in decided]
        for name in set[Name].intersection(*map(set, limits)):
            facts.update((name, "bends", noted) for noted in _of_limits(name, [one[name] for one in limits]))
        for name in set[Name].intersection(*(set(one.numbers) for one in decided)):
            kind = variation([(one.numbers[name],) for one in decided], counts)
            facts.add((name, "bends", (kind, kind != "equal")))
        return frozenset(facts)


def _of_limits(name: Name, values: Sequence[Limited]) -> Iterator[tuple[Any, bool]]:
    """Yield what facts tell of one comparison, and whether micro-batches differ.

    Args:
        name: Its name.
        values: The values and the limits in each micro-batch.
    """
    if name[-2] in STEPS:
        are_equal = all(one == values[0] for one in values)
        yield "equal" if are_equal else "apart", not are_equal
        return
    upper = _upper(name[-2])
    sides = frozenset((min(own), max(own)) for own in ([*map(upper, *one)] for one in values))
    yield sides, len(sides) > 1
    side, other = next(iter(sides))
    if len(sides) == 1 and side == other and len({len(one) for one, _ in values}) == 1:
        totals = [sum(entry) for entry in zip(*(one for one, _ in values), strict=True)]
        limits = [*zip(*(limit for _, limit in values), strict=True)]
        bounds = [sum(entry) if len({*entry}) > 1 else entry[0] for entry in limits]
        if {*map(upper, totals, bounds)} != {side}:
            yield "sum", True


def _upper(operation: str) -> Callable[[float, float], int]:
    """Return the function that tells on which side of a limit a value lies."""
    if operation.startswith(BESIDE):  # it is not known whether the limit itself is on the upper side
        return lambda value, limit: (value > limit) - (value < limit)
    if operation in _AT_LIMIT:
        return lambda value, limit: value == limit
    if operation in _FROM_LIMIT:
        return lambda value, limit: value >= limit
    return lambda value, limit: value > limit
