"""Loss rules: ways to weight the micro-batches of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.facts.terms import Terms

__all__ = ["LossRule", "declared", "likeliest", "restored"]

_DECLARED = ("loss_weight", "loss_is_sum")


@dataclass(frozen=True, slots=True)
class LossRule:
    """One way to weight micro-batches.

    Args:
        name: A name in words; two rules with the same name are the same rule.
        count: Returns the number of loss terms of a micro-batch; `None` counts its rows.
        adds: Whether losses add up without weights. `count` is then only the number of terms of a batch in its accumulation window.
        is_guess: Whether nothing but the numbers in a batch speaks for the rule. A check tries it only where no other rule agrees.
    """

    name: str
    count: Callable[[Any], Any] | None = None
    adds: bool = False
    is_guess: bool = False

    @property
    def reads_a_field(self) -> bool:
        """Whether the rule counts the terms by one field, on whatever device that is."""
        return isinstance(self.count, Terms)

    @property
    def class_weights(self) -> tuple[float, ...]:
        """The weight of each class, if the rule counts by class."""
        return self.count.weights if isinstance(self.count, Terms) else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the rule for a checkpoint; a declared rule is saved by its name only."""
        terms = asdict(self.count) if isinstance(self.count, Terms) else None
        return {"name": self.name, "terms": terms, "adds": self.adds}


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
    return LossRule(state["name"], Terms(**state["terms"]) if state["terms"] else None, adds=state["adds"])


def likeliest(rules: Sequence[LossRule]) -> LossRule:
    """Return the rule for undecided checks: scored labels if there are any, else rows.

    A declared rule is the only one in `rules`, and is returned.
    """
    return rules[1] if len(rules) > 1 and rules[1].name.startswith("scored") else rules[0]
