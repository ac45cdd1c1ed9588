"""Loss rules: ways to weight the micro-batches of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from typing import Any

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.facts.terms import Terms

__all__ = ["LossRule", "SummandRule", "declared", "likeliest", "restored"]

_MOST_VARIANTS = 64  # judgement: more summands with few terms are seldom in one batch
_DECLARED = ("loss_weight", "loss_is_sum")


@dataclass(frozen=True, slots=True)
class LossRule:
    """One way to weight micro-batches.

    Args:
        name: A name in words; two rules with the same name are the same rule.
        count: Returns the number of loss terms of a micro-batch; `None` counts its rows.
        adds: Whether losses add up without weights. `count` is then only the number of terms of a batch in its accumulation window.
        is_guess: Whether nothing but the numbers in a batch speaks for the rule. A check tries it only where no other rule agrees.
        least: The number of terms that stands for fewer: `loss.sum() / max(terms, 1)` has 1. Only summands have such rules.
        is_by_divisor: Whether the rule holds only for a summand whose divisor, in autograd's graph, is proportional to its counts.
        summands: The rules of the loss's summands, each with weights of its own; empty for a loss with one weight. The summands'
            weights make the losses of micro-batches shares, which add up.
    """

    name: str
    count: Callable[[Any], Any] | None = None
    adds: bool = False
    is_guess: bool = False
    least: float = 0.0
    is_by_divisor: bool = False
    summands: "tuple[SummandRule, ...]" = ()

    @classmethod
    def of_summands(cls, summands: "Sequence[SummandRule]") -> "LossRule":
        """Return the rule of a loss that is a sum of means over different terms."""
        named = "; ".join(f"{one.key}: {one.first.name}" for one in summands)
        return cls(f"a weight for each summand ({named})", adds=True, summands=tuple(summands))

    def at_least(self, least: float) -> "LossRule":
        """Return the rule whose terms are a number at least, as a guess."""
        return replace(self, name=f"{self.name}, at least {least:g}", least=least, is_guess=True)

    @property
    def reads_a_field(self) -> bool:
        """Whether the rule counts the terms by fields, on whatever device these are."""
        return isinstance(self.count, Terms) or any(one.first.reads_a_field for one in self.summands)

    @property
    def has_several(self) -> bool:
        """Whether several rules are left for a summand."""
        return any(one.is_open for one in self.summands)

    def variants(self) -> "list[LossRule]":
        """Return one rule for each choice among the weights of summands that no check has told apart."""
        choices = [one.rules if one.is_open else one.rules[:1] for one in self.summands]
        if not self.has_several or prod(map(len, choices)) > _MOST_VARIANTS:
            return [self]
        return [
            LossRule.of_summands([replace(one, rules=(rule,)) for one, rule in zip(self.summands, chosen, strict=True)])
            for chosen in product(*choices)
        ]

    def narrowed(self, variants: "Sequence[LossRule]") -> "LossRule":
        """Return this rule without the weights of summands that are in none of these variants."""
        left = [{variant.summands[at].first.name for variant in variants} for at in range(len(self.summands))]
        summands = [
            replace(one, rules=tuple(rule for rule in one.rules if rule.name in names)) if one.is_open else one
            for one, names in zip(self.summands, left, strict=True)
        ]
        return LossRule.of_summands(summands) if self.has_several else self

    @property
    def class_weights(self) -> tuple[float, ...]:
        """The weight of each class, if the rule counts by class."""
        return self.count.weights if isinstance(self.count, Terms) else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the rule for a checkpoint; a declared rule is saved by its name only."""
        terms = asdict(self.count) if isinstance(self.count, Terms) else None
        summands = [one.state_dict() for one in self.summands]
        found = {"name": self.name, "terms": terms, "adds": self.adds, "least": self.least, "summands": summands}
        return {**found, "is_by_divisor": self.is_by_divisor}


@dataclass(frozen=True, kw_only=True, slots=True)
class SummandRule:
    """The loss rules that may weight one summand of a loss.

    Args:
        key: The name of the summand.
        rules: The rules under which its gradient agreed. The first weights it.
        rejected: The names of rules under which it differed.
        is_told: Whether a check has told these rules from all others.
        is_divided: Whether the divisor in autograd's graph was proportional to the first rule's weights.
        is_zero: Whether the summand was multiplied by the number 0 in all checks, so that any rule holds for it.
    """

    key: str
    rules: tuple[LossRule, ...]
    rejected: frozenset[str] = frozenset()
    is_told: bool = False
    is_divided: bool = False
    is_zero: bool = False

    @property
    def is_open(self) -> bool:
        """Whether several rules are left, and it matters which holds."""
        return len(self.rules) > 1 and not self.is_zero

    @property
    def first(self) -> LossRule:
        """The rule that weights the summand."""
        return self.rules[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the rules for a checkpoint."""
        rules = [one.state_dict() for one in self.rules]
        found = {"key": self.key, "rules": rules, "rejected": sorted(self.rejected)}
        return {**found, "is_told": self.is_told, "is_divided": self.is_divided, "is_zero": self.is_zero}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> "SummandRule":
        """Return the rules restored from their `state_dict`."""
        rules = tuple(_restored(one) for one in state["rules"])
        return cls(**{**state, "rules": rules, "rejected": frozenset(state["rejected"])})


def declared(rules: MicroBatchRules) -> LossRule | None:
    """Return the rule that a module declares; None if the check has to find one."""
    if rules.loss_is_sum:
        return LossRule("loss_is_sum", rules.loss_weight, adds=True)
    return None if rules.loss_weight is None else LossRule("loss_weight", rules.loss_weight)


def restored(state: dict[str, Any], rules: MicroBatchRules) -> LossRule | None:
    """Return the rule restored from its `state_dict`.

    The result is None if the module's declaration has changed.
    """
    own = declared(rules)
    if own is not None or state["name"] in _DECLARED:
        return own if own is not None and own.name == state["name"] else None
    return _restored(state)


def _restored(state: dict[str, Any]) -> LossRule:
    count = Terms(**state["terms"]) if state["terms"] else None
    summands = tuple(map(SummandRule.restored, state.get("summands", ())))
    return LossRule(
        state["name"],
        count,
        adds=state["adds"],
        least=state.get("least", 0.0),
        is_by_divisor=state.get("is_by_divisor", False),
        summands=summands,
    )


def likeliest(rules: Sequence[LossRule]) -> LossRule:
    """Return the rule for undecided checks: scored labels if there are any, else rows.

    A declared rule is the only one in `rules`, and is returned.
    """
    return rules[1] if len(rules) > 1 and rules[1].name.startswith("scored") else rules[0]
