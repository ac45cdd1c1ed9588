"""The loss rules that agreed in checks so far, and the step of the last agreement."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.facts.labels import Scoring
from lightning_unified.step.exactness.findings import Findings
from lightning_unified.step.exactness.losses import (
    LossRule,
    candidates,
    declared,
    give_other_shares,
    guesses,
    guesses_by_divisor,
    guesses_of_whole_losses,
    restored,
)

__all__ = ["AgreedRules", "LastAgreement"]


class AgreedRules:
    """The loss rules under which gradients agreed, without those that a check rejected.

    Args:
        rules: The rules that the module declares for its batches.

    Attributes:
        agreeing: The rules that agreed in the last conclusive check, the first of which weights micro-batches.
    """

    def __init__(self, rules: MicroBatchRules) -> None:
        self._rules = rules
        self.agreeing: list[LossRule] = []
        self._rejected: set[str] = set()

    def candidates(
        self, batch: Any, rows: int, ignored: Collection[int] = (), scorings: Collection[Scoring] = ()
    ) -> list[LossRule]:
        """Return the loss rules that may hold for this batch.

        A declared rule is the only one. Otherwise these are the rules that agreed before, and the candidates of this batch that no check
        rejected. `ignored` holds labels that the module's losses are known to ignore, and `scorings` how they are known to score labels.
        """
        if (own := declared(self._rules)) is not None:
            return [own]
        known = {rule.name: rule for rule in (*self.agreeing, *candidates(batch, rows, ignored, scorings))}
        guessed = (*guesses(batch, rows), *guesses_of_whole_losses(batch, rows))
        known = {rule.name: rule for rule in guessed} | known
        # class weights that the loss has now may be those of an earlier epoch, which a check of the next one rejected
        present = {one.weights for one in scorings if one.weights}
        open_ = (one for name, one in known.items() if name not in self._rejected or one.class_weights in present)
        return sorted(open_, key=lambda one: one.is_guess)

    def of_summands(
        self, batch: Any, rows: int, ignored: Collection[int] = (), scorings: Collection[Scoring] = ()
    ) -> list[LossRule]:
        """Return the loss rules that may hold for a summand of the loss, whether or not they may for all of it.

        There are none if the module declares a rule. The arguments are those of `candidates`.
        """
        if declared(self._rules) is not None:
            return []
        named, guessed = candidates(batch, rows, ignored, scorings), [*guesses(batch, rows)]
        at_least = [one.at_least(1.0) for one in (*named, *guessed) if one.count is not None]
        found = [*named, *at_least, *guessed, *guesses_by_divisor(batch, rows, scorings)]
        return [*{rule.name: rule for rule in reversed(found)}.values()][::-1]

    def add(self, found: Findings) -> None:
        """Record the findings of a conclusive check."""
        self._rejected |= found.rejected
        self.agreeing = [replace(rule, is_guess=False) for rule in found.agreeing]

    @property
    def are_several(self) -> bool:
        """Whether several rules are left for the loss, or for one of its summands."""
        return len(self.agreeing) > 1 or any(rule.has_several for rule in self.agreeing)

    @property
    def first(self) -> str:
        """The name of the rule that weights micro-batches; empty before the first conclusive check."""
        return self.agreeing[0].name if self.agreeing else ""

    def keep(self, found: Findings | str) -> LossRule | None:
        """Keep the agreeing rules that also give the loss of all rows, and return the first; None where unknown."""
        if isinstance(found, str) or not self.agreeing:
            return None
        self.agreeing = [*found.agreeing]
        return self.agreeing[0]

    def give_other_shares(self, batches: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Return whether two of the agreeing rules weight the micro-batches differently."""
        own = [one.rules for rule in self.agreeing for one in rule.summands if one.is_open]
        return any(give_other_shares(rules, batches, sizes) for rules in (self.agreeing, *own))

    def state_dict(self) -> dict[str, Any]:
        """Return the rules for a checkpoint."""
        return {"rules": [rule.state_dict() for rule in self.agreeing], "rejected": sorted(self._rejected)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load the rules of another run; return False if the module's declaration has changed."""
        rules = [restored(one, self._rules) for one in state["rules"]]
        if None in rules:
            return False
        self.agreeing, self._rejected = [rule for rule in rules if rule is not None], set(state["rejected"])
        return True


@dataclass(frozen=True, slots=True)
class LastAgreement:
    """The step of the last agreeing check, and the checkpoint that was the newest then.

    Args:
        step: The number of optimizer steps; -1 before the first agreeing check.
        batch: The number of split batches.
        checkpoint: The path of the checkpoint; empty without one.
    """

    step: int = -1
    batch: int = 0
    checkpoint: str = ""

    @classmethod
    def now(cls, trainer: L.Trainer, batch: int) -> "LastAgreement":
        """Return a record of an agreeing check of split batch number `batch`."""
        written = [
            (callback._last_global_step_saved, callback._last_checkpoint_saved)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback._last_checkpoint_saved
        ]
        return cls(trainer.global_step, batch, max(written, default=(0, ""))[1])

    def since(self, step: int, batch: int) -> str:
        """Return a sentence about batches split since then; empty without any before `batch`."""
        if self.step < 0 or step <= self.step or batch <= self.batch + 1:
            return ""
        path = self.checkpoint
        is_left = bool(path) and get_filesystem(path).exists(path)
        resume = f"; the last checkpoint before it is {path}" if is_left else "; no checkpoint from before it is left"
        return f" Batches up to step {self.step} agreed; the first that may have been updated inexactly is step {self.step + 1}{resume}."
