"""The merge rules of one stage: outputs, logs, metrics and written state."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_unified.micro_batches import MergeRules
from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.sameness import size_of
from lightning_unified.step.results.state.entries import note_alone

__all__ = ["Tables", "owner_of"]

_THIN = 16  # batches checked for one log; judgement


@dataclass
class Tables:
    """The merge rules of one stage.

    Args:
        outputs: The rules for outputs of the step.
        logs: The rules for logged values.
        sized_logs: The rules for values logged with a `batch_size`, which is their weight.
        metrics: The rules for the states of torchmetrics objects.
        written: The rules for buffers, frozen parameters and attributes that the step writes.
        joins: For torchmetrics objects without `full_state_update=False`: whether their states add up over batches, by path.
        sized: The paths of dicts to which micro-batches add entries under their own number of rows.
        varying: The paths of state that equal runs write differently, such as times.
        redrawn: The paths of state that have been compared with that of a run with other random draws.
        by_summand: Whether summands of the loss have weights of their own.
        thin: The number of batches that a log had checked because a single micro-batch of each batch before had any, by its name.
    """

    outputs: MergeTable = field(default_factory=MergeTable)
    logs: MergeTable = field(default_factory=MergeTable)
    sized_logs: MergeTable = field(default_factory=MergeTable)
    metrics: MergeTable = field(default_factory=MergeTable)
    written: MergeTable = field(default_factory=MergeTable)
    joins: dict[str, bool] = field(default_factory=dict)
    sized: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)
    redrawn: set[str] = field(default_factory=set)
    by_summand: bool = False
    thin: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, rules: MergeRules) -> "Tables":
        """Return tables that hold the user's own rules."""
        return cls(outputs=MergeTable(given=rules.outputs), logs=MergeTable(given=rules.logs))

    @property
    def unmergeable(self) -> list[str]:
        """The paths of outputs and the names of logs that no rule merges."""
        return [*self.outputs.unmergeable, *self.logs.unmergeable]

    @property
    def paths(self) -> set[tuple[str, str]]:
        """The table and the path of each rule that was inferred."""
        return {(name, path) for name, table in self._inferred.items() for path in table.paths}

    @property
    def _inferred(self) -> dict[str, MergeTable]:
        return {name: table for name, table in vars(self).items() if isinstance(table, MergeTable)}

    def note_sized(self, paths: Iterable[str]) -> None:
        """Record entries of caches by number of rows, which each micro-batch fills."""
        for path in paths:
            self.sized.add(owner_of(path))
            note_alone(self.written, path)

    def is_thin(self, path: str, values: Sequence[Any]) -> bool:
        """Return whether a log may fit a sum by chance, and count the batch then.

        It fits the largest value as well where a single micro-batch of each batch has any. So does the recall of a rare class, although
        neither rule holds for it.
        """
        rules = self.logs.all_rules(path)
        fits_both = (
            "sum" in rules and bool(rules & {"max", "min"}) and rules.isdisjoint({"mean", "mean of rows", "equal"})
        )
        is_thin = fits_both and self.thin[path] < _THIN and any(size_of(value) > 0 for value in values)
        self.thin[path] += is_thin
        return is_thin

    def weigh_by_summand(self) -> None:
        """Note that summands of the loss have weights of their own from now on."""
        if not self.by_summand:
            self.by_summand = True
            for table in self._inferred.values():
                table.widen()

    def state_dict(self) -> dict[str, Any]:
        """Return the inferred rules, for a checkpoint."""
        tables = {name: table.state_dict() for name, table in self._inferred.items()}
        return {
            "tables": tables,
            "joins": dict(self.joins),
            "sized": sorted(self.sized),
            "varying": sorted(self.varying),
            "redrawn": sorted(self.redrawn),
            "by_summand": self.by_summand,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the rules that another run inferred."""
        for name, table in self._inferred.items():
            table.load_state_dict(state["tables"][name])
        self.joins, self.sized = dict(state["joins"]), set(state.get("sized", ()))
        self.varying, self.redrawn = set(state.get("varying", ())), set(state.get("redrawn", ()))
        self.by_summand = state.get("by_summand", False)


def owner_of(path: str) -> str:
    """Return the path of the dict that holds the entry at `path`."""
    return path.rsplit("[", 1)[0]
