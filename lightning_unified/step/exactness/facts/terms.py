"""Counts of loss terms, read from a field of a micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.exactness.facts.fields import graphs_of, leaf_at, lengths_at

__all__ = ["Terms"]


def _finite_rows(leaf: Tensor) -> Tensor:
    return leaf.isfinite().flatten(1).all(1)


def _rows_with_an_entry(leaf: Tensor) -> Tensor:
    return (leaf != 0).flatten(1).any(1)


_ONLY = "only "
_MARKS: dict[str, Callable[[Tensor], Tensor]] = {
    "above 0": lambda leaf: leaf > 0,
    "finite": torch.isfinite,
    "finite rows": _finite_rows,
    "rows with an entry": _rows_with_an_entry,
    "places up to": lambda leaf: leaf + 1,
}


@dataclass(frozen=True, slots=True)
class Terms:
    """Counts the loss terms of a micro-batch by one of its fields.

    Args:
        path: The path of the field.
        left_out: The value of entries that are no terms. None if the number of terms is the sum of the entries.
        shift: The number of entries at the start of each row that are no terms; negative for entries at its end.
        size: The attribute of a batch of graphs that is the number of terms; empty for other fields.
        kind: Another way to count: `"total"` of the entries, entries `"above 0"` or `"finite"`, `"finite rows"`, `"rows with an entry"` other
            than 0, `"places up to"` an index in each row, `"lengths"` of the rows' entries, or entries of the class `"only <class>"`; empty for none.
        weights: The weight of each class, if the entries are classes; then the number of terms is the sum of their weights.
        column: The column of the field whose entries count; None for all.
        others: The number of terms that each row has besides its `"lengths"`.
    """

    path: str
    left_out: int | None = None
    shift: int = 0
    size: str = ""
    kind: str = ""
    weights: tuple[float, ...] = ()
    column: int | None = None
    others: float = 0.0

    def __call__(self, micro_batch: Any) -> Any:
        """Return the number of terms; 0 if the micro-batch lacks the field.

        Rows are the weights if no micro-batch has a term.
        """
        if self.size:
            return next((getattr(graphs, self.size) for path, graphs in graphs_of(micro_batch) if path == self.path), 0)
        if self.kind == "lengths":
            lengths = lengths_at(micro_batch, self.path)
            return sum(lengths) + self.others * len(lengths)
        leaf = leaf_at(micro_batch, self.path)
        if leaf is None:
            return 0
        leaf = leaf if self.column is None else leaf[:, self.column]
        leaf = leaf[:, max(self.shift, 0) : min(self.shift, 0) or None] if self.shift else leaf
        if self.kind in _MARKS:
            leaf = _MARKS[self.kind](leaf)
        elif self.kind.startswith(_ONLY):
            leaf = leaf == int(self.kind.removeprefix(_ONLY))
        terms = leaf if self.left_out is None else leaf != self.left_out
        dtype = torch.float64 if leaf.device.type == "cpu" else torch.float32
        if self.weights:
            weights = torch.tensor(self.weights, dtype=dtype, device=leaf.device)
            terms = weights[leaf.long().clamp(0, len(weights) - 1)] * terms
        return terms.sum(dtype=dtype)
