"""Find the weights of each summand of a loss, from gradients of whole and split rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, isfinite

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.gradients import GradientSample, Tolerance, disagreement
from lightning_unified.step.exactness.losses.assigned import AssignedLabels
from lightning_unified.step.exactness.losses.rules import LossRule, SummandRule
from lightning_unified.step.exactness.losses.summands.tree import REST
from lightning_unified.step.exactness.losses.weighting import require_counts, shares, shares_differ

__all__ = ["RunOfSummands", "SummandFit", "are_proportional", "sums_up"]

_CONSTANT = 1e-2  # judgement: rules that differ so much and agree all the same weight a constant
_COARSE = 1e-3  # tolerances of 16 bits are larger
_DIVIDED = 1e-4  # relative rounding of a divisor in float32


@dataclass(frozen=True, kw_only=True)
class RunOfSummands:
    """The gradient and the value of each summand of the loss, in one run.

    Args:
        gradients: The gradients, by the key of the summand.
        values: The values.
        divisors: The divisors, of summands whose graph holds one.
        zeros: The summands that are multiplied by the number 0.
    """

    gradients: Mapping[str, GradientSample]
    values: Mapping[str, float]
    divisors: Mapping[str, float]
    zeros: Collection[str] = ()

    @property
    def loss(self) -> float:
        """The loss."""
        return sum(self.values.values())

    def has_rest(self, tolerance: Tolerance) -> bool:
        """Return whether the loss has more than its summands with a gradient, by more than rounding."""
        size = max((abs(one) for one in self.values.values() if isfinite(one)), default=0.0)
        return abs(self.values.get(REST, 0.0)) > tolerance.relative * size

    def without_rest(self) -> "RunOfSummands":
        """Return the run without what has no gradient."""
        return replace(self, values={key: value for key, value in self.values.items() if key != REST})


def sums_up(gradient: GradientSample, run: RunOfSummands, tolerance: Tolerance) -> bool:
    """Return whether the gradient of a loss is the sum of its summands' gradients; True where it is not finite."""
    if gradient.says_nothing and not gradient.is_zero:
        return True
    return disagreement(gradient, [(one, 1.0) for one in run.gradients.values()], tolerance).excess <= 1


class SummandFit:
    """Tries loss rules on each summand of a loss.

    Args:
        whole: The run of all rows.
        runs: Those of the micro-batches.
        batches: The micro-batches.
        sizes: The rows of each.
        tolerance: The tolerance for the formats of the runs.
        has_terms: In which micro-batches summands have terms, where that is known: alike ones of which some are left out.
    """

    def __init__(
        self,
        whole: RunOfSummands,
        runs: Sequence[RunOfSummands],
        batches: Sequence[object],
        sizes: Sequence[int],
        *,
        tolerance: Tolerance,
        has_terms: Mapping[str, Sequence[bool]],
    ) -> None:
        self._has_terms = has_terms
        self._whole, self._runs, self._batches, self._sizes, self._tolerance = whole, runs, batches, sizes, tolerance
        self._factors: dict[str, list[float] | None] = {}

    def rule(self, candidates: Sequence[LossRule], known: LossRule | None) -> LossRule | None:
        """Return the rule of the loss, with those that agree for each summand; None if none does for one.

        Args:
            candidates: The rules to try.
            known: The rule of the loss so far; its summands stay, even if these rows have none of them.
        """
        before = {one.key: one for one in known.summands} if known is not None else {}
        keys = [*before, *(key for key in self._whole.values if key not in before)]
        if any(key not in keys for run in self._runs for key in run.values):
            return None
        found = [self._summand(before.get(key, SummandRule(key=key, rules=())), candidates) for key in keys]
        left = [one for one in found if one is not None]
        return LossRule.of_summands(left) if left and len(left) == len(found) else None

    def _summand(self, before: SummandRule, candidates: Sequence[LossRule]) -> SummandRule | None:
        """Return the rules that still agree for a summand; None if none does."""
        key, names = before.key, {one.name for one in before.rules}
        if key not in self._whole.values:
            return None if any(run.values.get(key) for run in self._runs) else before
        pool = [*before.rules, *(one for one in candidates if one.name not in names | before.rejected)]
        pool = [one for one in (self._completed(key, rule) for rule in pool) if one is not None]
        # which of alike summands is left out is best told by the rules that are known
        tried, agreeing = self._agreeing(key, before.rules) if key in self._has_terms else ([], [])
        if not agreeing:
            tried, agreeing = self._agreeing(key, pool)
        if not agreeing:
            return None
        rejected = before.rejected
        if key not in self._has_terms:  # else they may agree if another of its kind is the one that is left out
            rejected |= {one.name for one in tried} - {one.name for one in agreeing}
        is_told, is_constant = self._tells(key), self._is_constant(key)
        divided = [one for one in agreeing if not is_constant and self._is_divided(key, one)]
        agreeing = divided or agreeing
        first = agreeing[0]
        if is_told and is_constant:
            agreeing = [first]
        elif is_told:
            agreeing = [one for one in agreeing if not self._differ(first, one)]
        is_divided = self._is_divided(key, first)
        return SummandRule(
            key=key,
            rules=tuple(agreeing),
            rejected=rejected,
            is_told=before.is_told or is_told,
            is_divided=is_divided and (before.is_divided or first.name not in names),
            is_zero=(before.is_zero or not before.rules) and self._is_zero(key),
        )

    def _agreeing(self, key: str, pool: Sequence[LossRule]) -> tuple[list[LossRule], list[LossRule]]:
        """Return the rules that were tried on a summand, and those under which it agrees.

        Guesses that need no divisor are left out where others agree, or rounding is coarse: some would agree by chance.
        """
        tried = [one for one in pool if not one.is_guess]
        agreeing = [one for one in tried if self._agrees(key, one)]
        if all(one.adds for one in agreeing) and self._tolerance.relative < _COARSE:
            tried = [*pool]
        else:
            tried = [one for one in pool if one.is_by_divisor or not one.is_guess]
        guessed = [replace(one, is_guess=False) for one in tried if one.is_guess and self._agrees(key, one)]
        return tried, [*agreeing, *guessed]

    def _completed(self, key: str, rule: LossRule) -> LossRule | None:
        """Return a rule with what the divisors of a summand tell; None if it does not count these micro-batches."""
        if isinstance(rule.count, AssignedLabels):
            divisors = [run.divisors.get(key) for run in self._runs]
            return rule.count.rule(divisors, self._batches, self._sizes)
        return None if self._factors_of(rule) is None else rule

    def _factors_of(self, rule: LossRule) -> list[float] | None:
        """Return the factors of the micro-batches under a rule; None if it does not count these."""
        if rule.name not in self._factors:
            self._factors[rule.name] = self._counted(rule)
        return self._factors[rule.name]

    def _counted(self, rule: LossRule) -> list[float] | None:
        try:
            if rule.count is not None:
                require_counts(rule, [float(rule.count(batch)) for batch in self._batches])
            return shares(rule, self._batches, self._sizes)
        except SplitError:
            return None

    def _agrees(self, key: str, rule: LossRule) -> bool:
        """Return whether a rule gives a summand's gradient and value of all rows."""
        factors = self._factors_of(rule) or []
        pairs = [(run, factor) for run, factor in zip(self._runs, factors, strict=True) if factor]
        if any(key not in run.values for run, _ in pairs) or (rule.is_by_divisor and not self._is_divided(key, rule)):
            return False
        if key in self._has_terms and [*self._has_terms[key]] != [bool(factor) for factor in factors]:
            return False
        value, whole = sum(run.values[key] * factor for run, factor in pairs), self._whole
        if not (isfinite(value) or isfinite(whole.values[key])):  # a mean over no terms
            return True
        losses = [*whole.values.values(), *(run.values[key] for run, _ in pairs)]
        size = max((abs(one) for one in losses if isfinite(one)), default=0.0)
        if not abs(value - whole.values[key]) <= self._tolerance.relative * size:
            return False
        weighted = [(run.gradients[key], factor) for run, factor in pairs if key in run.gradients]
        return key not in whole.gradients or disagreement(whole.gradients[key], weighted, self._tolerance).excess <= 1

    def _tells(self, key: str) -> bool:
        """Return whether a summand's gradients, or values without gradients, tell rules apart."""
        found = [run for run in self._runs if key in run.values]
        if key not in self._whole.gradients:
            sizes = [abs(run.values[key]) for run in found]
            return (
                sum(size > self._tolerance.relative * abs(run.loss) for size, run in zip(sizes, found, strict=True)) > 1
            )
        return sum(not run.gradients[key].says_nothing for run in found) > 1

    def _is_zero(self, key: str) -> bool:
        """Return whether a summand is multiplied by 0 in all runs, and has a gradient of zeros."""
        runs = [run for run in (self._whole, *self._runs) if key in run.values]
        return all(key in run.zeros and (key not in run.gradients or run.gradients[key].is_zero) for run in runs)

    def _is_constant(self, key: str) -> bool:
        """Return whether a summand is the same in all micro-batches, such as a penalty of parameters."""
        whole = self._whole
        if any(key not in run.values for run in self._runs):
            return False
        if any(abs(run.values[key] - whole.values[key]) > _CONSTANT * abs(whole.values[key]) for run in self._runs):
            return False
        gradients = [run.gradients[key] for run in self._runs if key in run.gradients]
        return all(disagreement(whole.gradients[key], [(one, 1.0)], self._tolerance).excess <= 1 for one in gradients)

    def _differ(self, one: LossRule, other: LossRule) -> bool:
        first, second = self._factors_of(one) or [], self._factors_of(other) or []
        return shares_differ(first, second) and any(
            abs(a - b) > _CONSTANT * max(a, b) for a, b in zip(first, second, strict=True)
        )

    def _is_divided(self, key: str, rule: LossRule) -> bool:
        """Return whether the divisors of a summand are proportional to the factors of a rule."""
        factors = self._factors_of(rule) or []
        pairs = [(run.divisors.get(key), factor) for run, factor in zip(self._runs, factors, strict=True) if factor]
        return are_proportional(pairs)


def are_proportional(pairs: Sequence[tuple[float | None, float]]) -> bool:
    """Return whether all divisors are known and proportional to the factors beside them."""
    known = [(divisor, factor) for divisor, factor in pairs if divisor is not None and isfinite(divisor)]
    if len(known) < len(pairs) or not known:
        return False
    divisor, factor = known[0]
    return all(isclose(one * factor, divisor * own, rel_tol=_DIVIDED) for one, own in known)
