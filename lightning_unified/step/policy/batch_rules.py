"""The rules and splitters of a run's batches, one of each for every stage."""

from typing import Any

import lightning as L

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.split import BatchSplitter
from lightning_unified.step.split.roles import Roles
from lightning_unified.step.split.rules import LEFT_BEHIND, can_be_pickled, rules_of

__all__ = ["BatchRules"]


class BatchRules:
    """Calls `configure_micro_batches` once a stage and fit; makes a splitter from the rules.

    A stage is `"fit"`, `"validate"`, `"test"` or `"predict"`, as in Lightning's `setup(stage)`.

    Args:
        given: Rules that the user gave to the strategy. They replace the module's own.
        check_split: Whether the exactness check runs where the rules leave it open.

    Attributes:
        known_roles: Roles of the batches' entries by stage, found by an earlier run; a dry run gets those of the real
            run.
    """

    def __init__(self, given: MicroBatchRules | None, *, check_split: bool) -> None:
        self.given = given
        self.known_roles: dict[str, Roles] = {}
        self._check_split = check_split
        self.begin(None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without the module.

        The given rules are included if they can be pickled.
        """
        given = self.given if can_be_pickled(self.given) else LEFT_BEHIND
        return {**vars(self), "given": given, "_module": None, "_rules": {}, "_splitters": {}}

    def begin(self, module: L.LightningModule | None) -> None:
        """Begin a fit or an evaluation of `module`."""
        self._module = module
        self._rules: dict[str, MicroBatchRules] = {}
        self._splitters: dict[str, BatchSplitter] = {}

    def runs(self, module: Any) -> bool:
        """Return whether this run trains or evaluates `module`."""
        return self._module is not None and module is self._module

    def of(self, stage: str) -> MicroBatchRules:
        """Return the rules for batches of `stage`."""
        if stage not in self._rules:
            self._rules[stage] = rules_of(self._module, stage, given=self.given)
        return self._rules[stage]

    def checks(self, stage: str) -> bool:
        """Return whether the exactness check compares split and whole batches of `stage`."""
        own = self.of(stage).check
        return self._check_split if own is None else own

    def splitter(self, stage: str) -> BatchSplitter:
        """Return the splitter for batches of `stage`.

        All callers share it, so that they agree on a batch's rows.
        """
        assert self._module is not None
        if stage not in self._splitters:
            roles = self.known_roles.get(stage)
            self._splitters[stage] = BatchSplitter(self._module, self.of(stage), stage=stage, roles=roles)
        return self._splitters[stage]
