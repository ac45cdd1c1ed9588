"""Find the number of rows of a batch, and the entries that are split."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import RowRules
from lightning_unified.step.split import refusals
from lightning_unified.step.split.containers import PLAIN, tensors_in
from lightning_unified.step.split.guess import assumed, guessed_rows
from lightning_unified.step.split.kinds import ARRAY_LIKE
from lightning_unified.step.split.roles import Place, Role, Roles, Tag, may_hold_rows, places_in
from lightning_unified.step.split.samples import LoaderSamples, SubBatch
from lightning_unified.step.split.sizes import BatchShape

__all__ = ["RowFinder"]


class RowFinder:
    """Finds the rows in the batches of one loader; the first batch decides the roles.

    The role of a place is: split by rows, shared by all micro-batches, or a list of columns. A place that first occurs in a later batch gets
    its role then. Until a batch is split, roles may still be corrected. Suppose that all batches so far had the same number of rows.
    If a later batch has another number, a place that keeps its old length becomes shared.

    Args:
        name: The name of the module's class, for messages.
        rules: The user's rules for rows.
        is_prepared: Whether the rule `prepare` makes the batches. Their number of rows may then differ from the loader's.
        roles: Roles that are known already, for a dry run.

    Attributes:
        roles: The role by path and tag.
        has_split: Whether a batch of the run has been split by these roles.
    """

    def __init__(self, name: str, rules: RowRules, *, is_prepared: bool = False, roles: Roles | None = None) -> None:
        self._name, self._shared, self._is_prepared = name, rules.shared, is_prepared
        self.roles: Roles = dict(roles or {})
        self.has_split = False
        self._lengths: dict[tuple[str, Tag], int | None] = {}  # the lengths of lists without a role
        self._rows: dict[str, int] = {}  # the rows of the previous batch, by the path of the sub-batch
        self._varies: set[str] = set()

    def rows(self, batch: Any, sub_batches: Sequence[SubBatch]) -> int | None:
        """Return the number of rows of `batch`; None if it is unknown or contradictory.

        The sub-batches are given by path, with the samples of their loaders.
        """
        found = {self._find(batch, path, samples) for path, samples in sub_batches}
        return found.pop() if len(found) == 1 else None

    def shape(self, batch: Any, sub_batches: Sequence[SubBatch]) -> BatchShape | None:
        """Return the size of `batch`; None if its number of rows is unknown.

        If the batch contradicts the roles, or its rows are ambiguous, this is its largest possible size. `refusal`
        decides whether it can be split.
        """
        rows = self.rows(batch, sub_batches)
        if rows is None:
            rows = max(self._largest(batch, path, samples) for path, samples in sub_batches)
        return BatchShape(rows, _elements(self._split_places(batch)) // rows) if rows else None

    def refusal(self, batch: Any, rows: int, sub_batches: Sequence[SubBatch]) -> SplitError | None:
        """Return the error why `batch` cannot be split as a batch of `rows` rows; None if it can."""
        if any(self._is_unknown(place) for place in self._places(batch)):
            for path, samples in sub_batches:
                self._find(batch, path, samples)
        split, off = 0, []
        for place in self._places(batch):
            if self._is_unknown(place):
                return self._ambiguity(batch)
            if place.tag == "object" and may_hold_rows(place.value, rows):
                return refusals.unknown_class(self._name, place)
            if self.roles.get(place.key) is not Role.ROWS:
                continue
            split += 1
            if place.size != rows:
                off.append(place)
            elif place.kind is ARRAY_LIKE:
                return refusals.unknown_class(self._name, place)
            elif place.kind is not None and (why := place.kind.refusal(place.value)) is not None:
                return refusals.unsplittable(self._name, why)
        if off:
            return self._contradiction(batch, off)
        return None if split else refusals.without_rows(self._name, batch)

    def _places(self, batch: Any, path: str = "") -> list[Place]:
        found = places_in(batch, "", self.roles, shared=self._shared)
        return [one for one in found if not path or one.path == path or one.path.startswith(f"{path}.")]

    def _split_places(self, batch: Any) -> list[Place]:
        return [one for one in self._places(batch) if self.roles.get(one.key) is Role.ROWS]

    def _is_unknown(self, place: Place) -> bool:
        return place.tag != "object" and place.key not in self.roles

    def _find(self, batch: Any, path: str, samples: Callable[[], LoaderSamples]) -> int | None:
        """Return the rows of the sub-batch at `path`, and record new roles; None if unknown."""
        self.roles.update({(above, "list"): Role.COLUMNS for above in _above(path)})
        places = self._places(batch, path)
        self._compare_lengths([one for one in places if one.tag == "list" and self._is_unknown(one)])
        known = [one for one in places if self.roles.get(one.key) is Role.ROWS and one.size is not None]
        fresh = [one for one in places if self._is_unknown(one)]
        rows = self._agreed(known, path) if known else self._guessed(fresh, path, samples())
        if rows is None:
            return None
        if fresh:
            found = samples()
            trial = assumed(fresh, path, found, rows, shared=self._shared, is_known=rows in found.counts)
            self.roles.update(trial.roles)
        if self._rows.setdefault(path, rows) != rows:
            self._varies.add(path)
        self._rows[path] = rows
        return rows

    def _guessed(self, places: Sequence[Place], path: str, samples: LoaderSamples) -> int | None:
        return guessed_rows(places, path, samples, shared=self._shared, is_prepared=self._is_prepared)

    def _compare_lengths(self, lists: Sequence[Place]) -> None:
        """Give undecided lists the role `ROWS` if their length has changed since an earlier batch.

        The number of columns never changes.
        """
        for one in lists:
            if self._lengths.setdefault(one.key, one.size) != one.size:
                self.roles[one.key] = Role.ROWS

    def _largest(self, batch: Any, path: str, samples: Callable[[], LoaderSamples]) -> int:
        """Return the largest possible number of rows of `batch`; 0 if it is unknown.

        This serves batches that contradict their roles, or have none.
        """
        places = self._places(batch, path)
        known = [one.size or 0 for one in places if self.roles.get(one.key) is Role.ROWS]
        if known:
            return max(known)
        counts = samples().counts
        return counts[0] if counts else max((one.size or 0 for one in places), default=0)

    def _agreed(self, known: list[Place], path: str) -> int | None:
        """Return the number of rows of the places split by rows; None if they contradict each other.

        Before the first split, places that keep the old length become shared.
        """
        sizes = {one.size for one in known}
        if len(sizes) > 1 and not self.has_split:
            stuck = self._stuck(known, path)
            self.roles.update({place.key: Role.SHARED for place in stuck})
            sizes = {one.size for one in known if one not in stuck}
        return sizes.pop() if len(sizes) == 1 else None

    def _stuck(self, known: Sequence[Place], path: str) -> list[Place]:
        """Return the places that keep the old size while all others share a new one."""
        before = self._rows.get(path)
        moved = {one.size for one in known if one.size != before}
        return [one for one in known if one.size == before] if len(moved) == 1 and path not in self._varies else []

    def _contradiction(self, batch: Any, off: Sequence[Place]) -> SplitError:
        places = self._split_places(batch)
        suspect = (self._stuck(places, "") or off)[0]
        return refusals.contradiction(
            self._name, places, suspect=suspect, is_late=self.has_split and suspect not in off
        )

    def _ambiguity(self, batch: Any) -> SplitError:
        most = refusals.MOST_NAMED
        entered = {one.key: Role.COLUMNS for one in self._places(batch) if (one.size or most) < most}
        places = places_in(batch, "", {**self.roles, **entered}, shared=self._shared)
        return refusals.ambiguity(self._name, list(places))


def _elements(places: Sequence[Place]) -> int:
    """Return the number of values in places that are split by rows."""
    total = 0
    for place in places:
        if place.kind is not None:
            total += place.kind.elements(place.value)
        elif not isinstance(next(iter(place.value), None), PLAIN):
            total += sum(tensor.numel() for tensor in tensors_in(place.value))
    return total


def _above(path: str) -> list[str]:
    """Return the paths of the containers that hold the sub-batch at `path`."""
    keys = path.split(".") if path else []
    return [".".join(keys[:index]) for index in range(len(keys))]
