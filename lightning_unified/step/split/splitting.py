"""Split the batches of one module and stage by declared rules, or by inferred roles."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import lightning as L

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.split.containers import PLAIN, entries_of, is_sequence, joined, tensors_in, with_entries
from lightning_unified.step.split.kinds import kind_of
from lightning_unified.step.split.padding import lengths_in, trimmed
from lightning_unified.step.split.roles import Role, Roles
from lightning_unified.step.split.rows import RowFinder
from lightning_unified.step.split.rules import given_to, rules_of
from lightning_unified.step.split.samples import UNKNOWN, LoaderSamples, SubBatch, samples_by_path
from lightning_unified.step.split.sizes import BatchShape, bounds, elements_per_row

__all__ = ["BatchSplitter", "planning_splitter", "splitter_of"]

_T = TypeVar("_T")


class BatchSplitter:
    """Counts and splits the batches of one stage of a module; the first batch decides the roles.

    Args:
        module: The module that gets the batches. The loaders of its Trainer give the number of samples in a batch.
        rules: The rules of the module; `rows.split` and `rows.count` replace the inferred roles and number of rows.
        stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        roles: The roles by path that another splitter has found.

    Attributes:
        trims: Whether micro-batches are trimmed to their longest rows.
    """

    def __init__(
        self, module: L.LightningModule, rules: MicroBatchRules, *, stage: str = "fit", roles: Roles | None = None
    ) -> None:
        self._module, self._name, self._stage = module, type(module).__name__, stage
        self._rules, self._known = rules, dict(roles or {})
        self._finders: dict[int, RowFinder] = {}
        self.trims = False

    def shape(self, batch: Any, *, loader: int = 0) -> BatchShape | None:
        """Return the size of `batch`; None if its rows are unknown, or the rule `count` fails.

        `loader` is the index of its loader, if several run one after another.
        """
        try:
            return self._measured(batch, loader)
        except Exception:  # an error of the rule; `require_shape` raises it if the batch must be split
            return None

    def require_shape(self, batch: Any) -> BatchShape | None:
        """Return the size of `batch`; raise an error if it is unknown and the batch may be split.

        Return None for a batch of no rows, which runs whole; with `splittable=False` also for an unknown number of rows.

        Raises:
            SplitError: If the number of rows is unknown and the module's batches may be split.
        """
        if not self._rules.splittable:
            return self.shape(batch)
        shape = self._measured(batch, loader=0)
        if shape is None and (refusal := self._finder(0).refusal(batch, 0, self._sub_batches(batch, 0))) is not None:
            raise refusal
        return shape

    def refusal(self, batch: Any, rows: int, *, loader: int = 0) -> SplitError | None:
        """Return the error why `batch`, with `rows` rows, cannot be split; None if it can."""
        if self._rules.rows.split is not None:
            return None
        return self._finder(loader).refusal(batch, rows, self._sub_batches(batch, loader))

    def require_rows(self, batch: Any, rows: int, *, loader: int = 0) -> None:
        """Raise `SplitError` if `batch` cannot be split as a batch of `rows` rows."""
        refusal = self.refusal(batch, rows, loader=loader)
        if refusal is not None:
            raise refusal

    def split(self, batch: Any, start: int, stop: int, *, rows: int, loader: int = 0) -> Any:
        """Return rows `start` to `stop` of `batch`, which has `rows` rows, in the same structure.

        Dense tensors are views. Entries without rows are shared, and so are numbers, strings and None.

        Raises:
            SplitError: If the batch cannot be split by rows.
        """
        return self._split(batch, [(start, stop)], rows=rows, loader=loader)[0]

    def micro_batches(self, batch: Any, sizes: Sequence[int], *, loader: int = 0) -> list[Any]:
        """Return the micro-batches of `batch` with the given `sizes` in rows; they run in its place.

        From now on, the roles are fixed: a batch was split by them.

        Raises:
            SplitError: If the batch cannot be split by rows.
        """
        found = self._split(batch, bounds(sizes), rows=sum(sizes), loader=loader)
        self._finder(loader).has_split = True
        return found

    def trimming_if_needed(
        self, batch: Any, compare: Callable[[], _T], *, anywhere: Callable[[bool], bool], loader: int = 0
    ) -> _T:
        """Return `compare()`, with trimmed micro-batches if the step fails on rows of a padded batch.

        A step that goes by the longest length that it gets needs them. From then on, all micro-batches are trimmed.

        Args:
            batch: The batch whose rows are compared.
            compare: Compares rows, whole and split.
            anywhere: Returns whether a flag is set in one of the processes that compare.
            loader: The index of the batch's loader.

        Raises:
            SplitError: The first one, if it fails again.
        """
        try:
            return compare()
        except SplitError as refusal:
            failed = refusal
            if not anywhere(refusal.is_of_rows) or not anywhere(self._may_trim(batch, loader)):
                raise
        self.trims = True  # outside the block above, as the traceback holds tensors
        try:
            return compare()
        except SplitError:
            self.trims = False
        raise failed

    def _may_trim(self, batch: Any, loader: int) -> bool:
        is_inferred = self._rules.rows.split is None
        return not self.trims and is_inferred and bool(lengths_in(batch, self._finder(loader).roles))

    def roles(self, *, loader: int = 0) -> Roles:
        """Return a copy of the roles found so far, by path."""
        return dict(self._finder(loader).roles)

    def _split(self, batch: Any, spans: Sequence[tuple[int, int]], *, rows: int, loader: int) -> list[Any]:
        own = self._rules.rows.split
        if own is not None:
            return [own(batch, *span) for span in spans]
        self.require_rows(batch, rows, loader=loader)
        roles = self._finder(loader).roles
        parts = [_rows_of(batch, "", *span, roles=roles) for span in spans]
        lengths = lengths_in(batch, roles) if self.trims else []
        return [trimmed(part, lengths, *span, roles) for part, span in zip(parts, spans, strict=True)]

    def _measured(self, batch: Any, loader: int) -> BatchShape | None:
        rules = self._rules.rows
        counted = None if rules.count is None else self._counted(batch)
        if counted is not None and rules.split is not None:
            return BatchShape(counted, elements_per_row(batch, counted))
        finder, sub_batches = self._finder(loader), self._sub_batches(batch, loader, counted)
        if rules.split is not None:  # the rule `split` needs the exact number of rows
            rows = finder.rows(batch, sub_batches)
            return None if rows is None else BatchShape(rows, elements_per_row(batch, rows))
        shape = finder.shape(batch, sub_batches)
        if counted is None:
            return shape
        return BatchShape(counted, 0 if shape is None else shape.elements)

    def _sub_batches(self, batch: Any, loader: int, counted: int | None = None) -> list[SubBatch]:
        if self._rules.rows.count is not None:
            samples = LoaderSamples(counts=(counted or self._counted(batch),))
            return [("", lambda: samples)]
        return samples_by_path(self._module._trainer, self._stage, loader, batch)

    def _finder(self, loader: int) -> RowFinder:
        if loader not in self._finders:
            is_prepared = self._stage == "fit" and self._rules.prepare is not None and self._rules.rows.count is None
            self._finders[loader] = RowFinder(self._name, self._rules.rows, is_prepared=is_prepared, roles=self._known)
        return self._finders[loader]

    def _counted(self, batch: Any) -> int:
        rows = self._rules.rows.count(batch) if self._rules.rows.count is not None else None
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise SplitError(
                f"RowRules(count=…) of {self._name} returned {rows!r}; it must return the number of rows, 1 or more."
            )
        return rows


def splitter_of(module: L.LightningModule, stage: str, *, trainer: L.Trainer | None = None) -> BatchSplitter:
    """Return the splitter of `module` in the run of `trainer`, or a new one outside a run.

    A stage is `"fit"`, `"validate"`, `"test"` or `"predict"`.
    """
    policy = getattr(getattr(trainer, "strategy", None), "policy", None)
    if policy is not None and policy.batches.runs(module):
        return policy.batches.splitter(stage)
    return planning_splitter(module, rules_of(module, stage, given=given_to(trainer)), stage=stage)


def planning_splitter(module: L.LightningModule, rules: MicroBatchRules, *, stage: str = "fit") -> BatchSplitter:
    """Return a splitter that predicts from one batch, without loaders.

    If the rows are ambiguous, the most common first dimension of the tensors is the number of rows.
    """
    rows = rules.rows
    if rows.count is None and rows.split is None:
        rows = replace(rows, count=partial(_likeliest_rows, RowFinder(type(module).__name__, rows)))
    return BatchSplitter(module, replace(rules, rows=rows), stage=stage)


def _likeliest_rows(finder: RowFinder, batch: Any) -> int | None:
    rows = finder.rows(batch, [("", lambda: UNKNOWN)])
    if rows is not None:
        return rows
    votes = Counter(tensor.size(0) for tensor in tensors_in(batch) if tensor.dim())
    return votes.most_common(1)[0][0] if votes else None


def _rows_of(value: Any, path: str, start: int, stop: int, *, roles: Roles) -> Any:
    kind = kind_of(value)
    if kind is not None:
        return kind.split(value, start, stop) if roles.get((path, "leaf")) is Role.ROWS else value
    if isinstance(value, PLAIN):
        return value
    if is_sequence(value):
        role = roles.get((path, "list"))
        if role is not Role.COLUMNS:
            return value[start:stop] if role is Role.ROWS else value
    entries = entries_of(value)
    if entries is None:
        return value
    return with_entries(
        value, [(key, _rows_of(entry, joined(path, key), start, stop, roles=roles)) for key, entry in entries]
    )
