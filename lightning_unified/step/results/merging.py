"""Merge rules: found by comparing whole and split values, kept while they fit.

A value is anything that a step returns, logs or keeps: a tensor, an array, a number. `MergeTable` starts with every rule that fits the
first check, and drops those that a later check refutes. The first fitting rule is often wrong. A count fits a mean where all micro-batches
have one row, and an F1 score may fit a mean by chance.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.step.results.kept_gradients import gradients_of
from lightning_unified.step.results.of_summands import AS_LOSS, OF_SUMMANDS, addends, as_loss, rules_of_summands
from lightning_unified.step.results.sameness import same, size_of
from lightning_unified.step.split.containers import is_sequence, with_class_of

__all__ = ["LAST", "MergeTable", "MicroBatchWeights", "fitting", "merged"]

Rule = str | Callable[[list[Any], list[int]], Any]

CONCATENATIONS = tuple(f"concatenate {dim}" for dim in range(4))
FIGURES = ("mean", "mean of rows", "sum", "max", "min")
_SUMS = ("mean", "mean of rows", "sum", *OF_SUMMANDS)
_EXTREMES = ("max", "min")
LAST = "last"  # noted for values that equal runs write differently, such as times
_SHAPE = "shape"  # of lengths in a tensor: rows add up, and the others are equal
# of several fitting rules the first is used
_ORDER = (LAST, "as written", "equal", *CONCATENATIONS, *FIGURES, AS_LOSS, *OF_SUMMANDS, _SHAPE)


@dataclass(frozen=True, slots=True)
class MicroBatchWeights:
    """The rows and loss terms of a batch's micro-batches, which weigh the means.

    Args:
        rows: The rows of each micro-batch.
        terms: The loss terms of each; its rows where nothing else is known.
        summands: For each summand of the loss with a weight of its own, the factors of the micro-batches' summands.
        losses: The micro-batches' losses, if such summands weigh them; else none.
        loss: The whole batch's loss then.
    """

    rows: Sequence[int]
    terms: Sequence[float]
    summands: Sequence[Sequence[float]] = ()
    losses: Sequence[float] = ()
    loss: float = 0.0

    def of(self, indices: Sequence[int]) -> "MicroBatchWeights":
        """Return the weights of some of the micro-batches."""
        if len(indices) == len(self.rows):
            return self
        return MicroBatchWeights([self.rows[index] for index in indices], [self.terms[index] for index in indices])


def merged(rule: Rule, values: Sequence[Any], weights: MicroBatchWeights) -> Any:
    """Return the whole batch's value by one rule, with the gradient that the values have kept.

    Args:
        rule: Its name, such as `"mean"` or `"concatenate 1"` (along dimension 1), or a function of the values and the row counts.
        values: One for each micro-batch.
        weights: The rows and loss terms of the micro-batches.

    Raises:
        SplitError: If the rule is `"equal"` and the values differ, or the rule does not apply to such values.
        Exception: If memory runs out.
    """
    if not isinstance(rule, str):
        return rule(list(values), list(weights.rows))
    value = _merged(rule, values, weights)
    gradients = None if rule in (LAST, "sum", *_EXTREMES) else gradients_of(values)
    if gradients:
        value = value.detach()
        value.grad = _merged(rule if rule in CONCATENATIONS else "sum", gradients, weights)
    return value


def _merged(rule: str, values: Sequence[Any], weights: MicroBatchWeights) -> Any:
    if rule == LAST:
        return values[-1]
    if rule == "equal":
        if not all(same(value, values[0]) for value in values[1:]):
            raise SplitError("a value that was the same in all micro-batches so far differs between them now")
        return values[0]
    try:
        if rule.startswith("concatenate"):
            return _concatenated(values, dim=int(rule.removeprefix("concatenate") or 0))
        if rule == _SHAPE:
            return _shape(values)
        return with_class_of(values[0], _figure(rule, values, weights))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise SplitError(f"values of micro-batches cannot be put together by {rule!r}: {error}") from error


def _concatenated(values: Sequence[Any], *, dim: int) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return with_class_of(first, torch.cat(list(values), dim))
    if isinstance(first, np.ndarray):
        return np.concatenate(list(values), dim)
    if isinstance(first, (list, tuple)) and dim == 0:
        return type(first)(entry for value in values for entry in value)
    raise TypeError(f"{type(first).__name__} values have no dimension {dim}")


def _shape(values: Sequence[Tensor]) -> Tensor:
    first, *others = values
    if not all(torch.equal(one[1:], first[1:]) for one in others):
        raise ValueError("shapes of rows differ")
    return torch.cat([torch.stack(list(values)).sum(0)[:1], first[1:]])


def _figure(rule: str, values: Sequence[Any], weights: MicroBatchWeights) -> Any:
    if rule in _EXTREMES:
        if isinstance(values[0], Tensor):
            stacked = torch.stack(list(values))
            return stacked.amax(0) if rule == "max" else stacked.amin(0)
        return (max if rule == "max" else min)(values)
    if rule == AS_LOSS:
        return as_loss(values, weights.losses, weights.loss)
    total = _total(_summands(rule, values, weights))
    # NumPy's arithmetic makes a number of an array without dimensions, such as `loss.detach().numpy()`
    return np.asarray(total) if isinstance(values[0], np.ndarray) else total


def _summands(rule: str, values: Sequence[Any], weights: MicroBatchWeights) -> Sequence[Any]:
    """Return the numbers that a sum or a mean of `values` adds up."""
    if rule == "sum":
        return values
    if rule in OF_SUMMANDS:
        return addends(rule, values, weights.summands)
    counts = weights.terms if rule == "mean" else weights.rows
    pairs = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    if not pairs:
        pairs = [(value, 1) for value in values]
    total = sum(count for _, count in pairs)
    return [value * (count / total) for value, count in pairs]


def _total(values: Sequence[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


_SMALL = 4096  # entries
_MOST_LENGTHS = 8  # of a shape


def _rounding(value: Any) -> float:
    """Return the relative rounding of results that two rules compute."""
    return 1e-2 if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else 1e-5


def fitting(values: Sequence[Any], whole: Any, weights: MicroBatchWeights, *, tolerance: float) -> frozenset[str]:
    """Return the names of the rules that merge the micro-batches' values into the whole's.

    Args:
        values: One for each micro-batch.
        whole: The whole batch's value.
        weights: The rows and loss terms of the micro-batches.
        tolerance: Largest relative difference that counts as rounding. For sums and means it is relative to the largest summand, as
            for gradients (`step.exactness.gradients`): summands that cancel leave a result of nothing but their rounding.
    """
    if any(type(value) is not type(whole) for value in values):
        return frozenset()
    values, whole = [_near(value) for value in values], _near(whole)
    fits = {"equal"} if all(same(value, whole) for value in values) else set()
    for rule in (*_concatenations(values, whole), *_figures(whole), *rules_of_summands(whole, len(weights.summands))):
        try:
            result = merged(rule, values, weights)
        except SplitError:
            continue
        if type(result) is not type(whole):
            continue
        if same(result, whole, tolerance=tolerance) or (
            rule in _SUMS and same(result, whole, tolerance=tolerance, size=_largest(_summands(rule, values, weights)))
        ):
            fits.add(rule)
    return frozenset(fits)


def _largest(values: Sequence[Any]) -> float:
    return max(map(size_of, values))


def _near(value: Any) -> Any:
    """Return a small tensor on the host, so that comparisons wait for the device once; anything else as it is."""
    is_small = isinstance(value, Tensor) and value.numel() <= _SMALL
    return with_class_of(value, value.detach().cpu()) if is_small else value


def _concatenations(values: Sequence[Any], whole: Any) -> Sequence[str]:
    if isinstance(whole, (Tensor, np.ndarray)):
        return [
            rule
            for dim, rule in enumerate(CONCATENATIONS[: whole.ndim])
            if all(value.ndim == whole.ndim for value in values)
            and sum(value.shape[dim] for value in values) == whole.shape[dim]
        ]
    return CONCATENATIONS[:1] if is_sequence(whole) else ()


def _figures(whole: Any) -> Sequence[str]:
    if isinstance(whole, Tensor) and whole.dtype == torch.bool:
        return _EXTREMES if whole.numel() > 1 else ()  # "or" and "and"; one flag would fit by chance
    if isinstance(whole, bool):
        return ()
    is_row = isinstance(whole, Tensor) and whole.dtype == torch.int64 and whole.dim() == 1
    if is_row and 1 < len(whole) <= _MOST_LENGTHS:
        return (*FIGURES, _SHAPE)
    return FIGURES if isinstance(whole, (int, float, Tensor, np.number)) or _is_numeric(whole) else ()


def _is_numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "iuf"


def _every(_rule: str) -> bool:
    return True


@dataclass
class MergeTable:
    """The rules that fit all checks so far, by path.

    Args:
        given: The user's rules, by path.
        allowed: Returns whether a rule may be inferred.

    Attributes:
        unmergeable: Paths whose values fit no rule.
        drawn: Paths whose values random draws alone decide: equal for the same draws, of any rows. Micro-batches make draws of their own.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    allowed: Callable[[str], bool] = _every
    unmergeable: set[str] = field(default_factory=set)
    drawn: set[str] = field(default_factory=set)
    _fits: dict[str, frozenset[str]] = field(default_factory=dict)

    def learn(
        self, path: str, values: Sequence[Any], whole: Any, weights: MicroBatchWeights, *, tolerance: float
    ) -> None:
        """Keep only the rules for `path` that also fit these values."""
        if path in self.given or LAST in self.all_rules(path):
            return
        fits = frozenset(filter(self.allowed, fitting(values, whole, weights, tolerance=tolerance)))
        self._fits[path] = self._fits.get(path, fits) & fits
        if not self._fits[path]:
            self.unmergeable.add(path)

    def state_dict(self) -> dict[str, Any]:
        """Return the inferred rules, for a checkpoint."""
        fits = {path: sorted(rules) for path, rules in self._fits.items()}
        return {"fits": fits, "unmergeable": sorted(self.unmergeable), "drawn": sorted(self.drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the inferred rules by those of another table."""
        self._fits = {path: frozenset(rules) for path, rules in state["fits"].items() if path not in self.given}
        self.unmergeable = set(state["unmergeable"]) - set(self.given)
        self.drawn = set(state.get("drawn", ()))

    def note(self, path: str, *rules: str) -> None:
        """Set the only rules for `path`, which are not inferred from values."""
        self._fits[path] = frozenset(rules)

    def reject(self, path: str) -> None:
        """Record that no rule merges the values at `path`.

        One example is a value that only some of the runs have.
        """
        if path not in self.given:
            self._fits[path] = frozenset()
            self.unmergeable.add(path)

    def widen(self) -> None:
        """Let means of the loss's terms also be the loss itself, or means of one of its summands."""
        for path, rules in self._fits.items():
            if rules & {"mean", "sum"}:
                self._fits[path] = rules | {AS_LOSS, *OF_SUMMANDS}

    def drop(self, path: str, rules: Collection[str]) -> bool:
        """Leave out inferred rules for `path`; return whether no other rule is left."""
        if path in self.given or not self._fits.get(path):
            return False
        self._fits[path] -= frozenset(rules)
        if not self._fits[path]:
            self.unmergeable.add(path)
        return not self._fits[path]

    @property
    def paths(self) -> Collection[str]:
        """All paths with a given or inferred result."""
        return {*self.given, *self._fits}

    def knows(self, path: str) -> bool:
        """Return whether `path` has a given rule, or a check has seen its values."""
        return path in self.given or path in self._fits

    def decides(self, path: str, values: Sequence[Any], weights: MicroBatchWeights) -> bool:
        """Return whether `path` is known, and all rules that are left for it give one result for these values.

        They may not: a count that was 0 in all checks fits a mean, a sum and an equal value. The two means count as one here, because
        their weights tell where they differ.
        """
        if path in self.given or path not in self._fits:
            return path in self.given
        rules = [rule for rule in _ORDER if rule in self._fits[path]]
        if self._is_drawn(path) or len(rules) < 2 or set(rules) <= {"mean", "mean of rows"}:
            return True
        if "equal" in rules:
            if not all(same(value, values[0]) for value in values[1:]):
                return False
            rules = ["equal", *(rule for rule in rules if rule in ("sum", _SHAPE, *CONCATENATIONS))]
        elif "mean" in rules and "mean of rows" in rules:
            rules.remove("mean of rows")
        if AS_LOSS in rules:  # the loss of every micro-batch is only by chance the mean of a summand too
            rules = [rule for rule in rules if rule not in OF_SUMMANDS]
        try:
            first, *others = [merged(rule, values, weights) for rule in rules]
        except SplitError:
            return False
        return all(same(other, first, tolerance=_rounding(first)) for other in others)

    def rule(self, path: str) -> Rule | None:
        """Return the rule for `path`; None where none fits or no check has seen it."""
        if path in self.given:
            return self.given[path]
        if self._is_drawn(path):
            return LAST
        fits = self._fits.get(path, frozenset())
        return next((rule for rule in _ORDER if rule in fits), None)

    def _is_drawn(self, path: str) -> bool:
        """Return whether each micro-batch's value is as good as the whole batch's: another draw."""
        return path in self.drawn and "equal" in self.all_rules(path)

    def all_rules(self, path: str) -> frozenset[str]:
        """Return every inferred rule that is left for `path`."""
        return self._fits.get(path, frozenset())
