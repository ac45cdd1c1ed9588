"""Decide the role of each entry of a batch: rows, columns or shared."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum
from os import PathLike
from typing import Any, Literal

import numpy as np
from torch import Tensor

from lightning_unified.step.split.containers import PLAIN, entries_of, is_sequence, joined
from lightning_unified.step.split.kinds import ARRAY_LIKE, Kind, kind_of
from lightning_unified.step.split.samples import LoaderSamples

__all__ = ["Place", "Role", "Roles", "Tag", "Trial", "may_hold_rows", "places_in", "tried"]


class Role(Enum):
    """The treatment of an entry when its batch is split."""

    ROWS = "split by rows"
    SHARED = "given whole to every micro-batch"
    COLUMNS = "a list whose entries have roles of their own"


Tag = Literal["leaf", "list", "object"]
Roles = dict[tuple[str, Tag], Role]


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a batch that may have a role.

    It is a leaf with a kind, a list, or an object of an unknown class.
    """

    path: str
    tag: Tag
    value: Any
    kind: Kind | None = None

    @property
    def key(self) -> tuple[str, Tag]:
        """The key of its role; an entry with another tag at the same path has its own role."""
        return self.path, self.tag

    @property
    def size(self) -> int | None:
        """The number of rows if it is split; None without a row dimension."""
        if self.kind is not None:
            return self.kind.rows(self.value)
        return len(self.value) if self.tag == "list" else None


@dataclass(slots=True)
class Trial:
    """The roles of a batch's places, assuming a given number of rows.

    Attributes:
        roles: The role by the key of the place.
        left_over: Leaves whose first dimension is neither the number of rows nor 1.
        undecided: Lists whose entries may be columns or rows.
    """

    roles: Roles = field(default_factory=dict)
    left_over: list[Place] = field(default_factory=list)
    undecided: list[Place] = field(default_factory=list)

    @property
    def has_rows(self) -> bool:
        """Whether any place has the role `ROWS`."""
        return any(role is Role.ROWS for role in self.roles.values())


def places_in(
    value: Any, path: str, roles: Mapping[tuple[str, Tag], Role], *, shared: Sequence[str]
) -> Iterator[Place]:
    """Yield the places of `value`, and of the lists in it whose role is `COLUMNS`.

    Args:
        value: A batch, or an entry of it.
        path: The path of `value` in the batch.
        roles: The roles known so far.
        shared: Paths that the user has declared as shared; they are skipped.
    """
    if path and path in shared:
        return
    kind = kind_of(value)
    if kind is not None:
        yield Place(path, "leaf", value, kind)
    elif is_sequence(value):
        if roles.get((path, "list")) is Role.COLUMNS:
            for index, entry in enumerate(value):
                yield from places_in(entry, joined(path, index), roles, shared=shared)
        else:
            yield Place(path, "list", value)
    elif not isinstance(value, PLAIN):
        entries = entries_of(value)
        if entries is None:
            yield Place(path, "object", value)
        for key, entry in entries or ():
            yield from places_in(entry, joined(path, key), roles, shared=shared)


def tried(
    places: Sequence[Place], rows: int, *, root: str, shared: Sequence[str], samples: LoaderSamples, is_known: bool
) -> Trial:
    """Return the roles of `places` and of the entries of lists among them, assuming `rows` rows.

    Args:
        places: Places without roles so far.
        rows: The assumed number of rows of the batch.
        root: The path of the batch, or of the sub-batch of one loader.
        shared: Paths that the user has declared as shared.
        samples: The samples in a batch of the loader.
        is_known: Whether `rows` comes from the loader or the user; a guess needs more evidence.
    """
    trial, following, collates = Trial(), list(places), samples.collates
    for place in following:
        if place.tag == "leaf":
            trial.roles[place.key] = Role.ROWS if place.size == rows else Role.SHARED
            if place.size is not None and samples.is_constant(place.value):
                trial.roles[place.key] = Role.SHARED
            elif place.size not in (rows, None, 1) and place.kind is not ARRAY_LIKE:
                trial.left_over.append(place)
        elif place.tag == "list":
            known = collates if place.path == root or collates == "columns" else None
            role = _role_of_list(place.value, rows, collates=known)
            if place.path == root and role is not Role.COLUMNS and len(place.value) == rows:
                role = _role_of_root(place.value, role, collates=collates, is_known=is_known)
            if role is None:
                trial.undecided.append(place)
                continue
            trial.roles[place.key] = role
            if role is Role.COLUMNS:
                for index, entry in enumerate(place.value):
                    following.extend(places_in(entry, joined(place.path, index), {}, shared=shared))
    _decide_by_siblings(trial, following)
    return trial


def _decide_by_siblings(trial: Trial, places: Sequence[Place]) -> None:
    """Give an undecided list the role `ROWS` if a list beside it has that role.

    For instance, `tuple(zip(*batch))` gives lists of rows only.
    """
    beside = {_parent(one.path) for one in places if trial.roles.get(one.key) is Role.ROWS and _holds_samples(one)}
    for place in list(trial.undecided):
        if place.path and _parent(place.path) in beside:
            trial.undecided.remove(place)
            trial.roles[place.key] = Role.ROWS


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _holds_samples(place: Place) -> bool:
    """Return whether a place is a list of tensors or containers.

    Lists of strings or numbers have one entry per row in any batch, so they are no evidence.
    """
    return place.tag == "list" and not any(isinstance(entry, PLAIN) for entry in place.value)


def _role_of_list(value: Any, rows: int, *, collates: Literal["columns", "rows"] | None) -> Role | None:
    """Return the role of a list in a batch of `rows` rows; None if it is ambiguous."""
    if len(value) != rows:
        return Role.COLUMNS
    types = {*map(type, value)} - {type(None)}
    if len(types) == 1 and issubclass(next(iter(types)), PLAIN):
        return Role.ROWS  # a fast path: such lists may be long
    if not _is_of_one_sort(value):
        return Role.COLUMNS
    spans = [one for one in (_spans(entry, rows) for entry in value) if one is not None]
    if not spans or not all(spans):
        return Role.ROWS
    if collates is not None:
        return Role.ROWS if collates == "rows" else Role.COLUMNS
    return None


def _role_of_root(
    value: Any, role: Role | None, *, collates: Literal["columns", "rows"] | None, is_known: bool
) -> Role | None:
    """Return the role of a whole batch that is a list; None if it is ambiguous.

    Two entries usually are columns, such as `(x, y)`.
    """
    if role is None:
        return Role.COLUMNS if len(value) <= 2 else None
    bare = any(isinstance(entry, (Tensor, np.ndarray)) or is_sequence(entry) for entry in value)
    return Role.COLUMNS if bare and not is_known and collates != "rows" else role


def _is_of_one_sort(entries: Any) -> bool:
    """Return whether the entries of a list may be rows of one kind.

    They then have the same type, and the same dtype and number of dimensions, or the same names.
    """
    sorts = {_sort_of(entry) for entry in entries if entry is not None}
    return len(sorts) <= 1


def _sort_of(entry: Any) -> Any:
    if isinstance(entry, (int, float)):
        return "number"
    if isinstance(entry, Tensor):
        return "tensor", entry.dtype, entry.dim()
    if isinstance(entry, np.ndarray):
        return "array", entry.dtype, entry.ndim
    if isinstance(entry, Mapping):
        return "mapping", tuple(sorted(map(str, entry)))
    return type(entry)


def _spans(entry: Any, rows: int) -> bool | None:
    """Return whether everything in `entry` has length `rows`; None without lengths."""
    kind = kind_of(entry)
    if kind is not None:
        size = kind.rows(entry)
        return None if size is None else size == rows
    if is_sequence(entry) and (len(entry) == rows or not any(_spans(one, rows) is not None for one in entry)):
        return len(entry) == rows
    inside = [_spans(one, rows) for _, one in entries_of(entry) or ()]
    known = [one for one in inside if one is not None]
    return all(known) if known else None


def may_hold_rows(value: Any, rows: int, *, depth: int = 3) -> bool:
    """Return whether an object of an unknown class may hold one entry per row.

    It may if it holds a tensor or an array, or something of length `rows`.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0
    if isinstance(value, (*PLAIN, type, PathLike)) or depth == 0:
        return False
    if isinstance(value, Sized) and len(value) == rows:
        return True
    inside = [entry for _, entry in entries_of(value) or ()]
    inside += getattr(value, "__dict__", {}).values()
    inside += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return any(may_hold_rows(one, rows, depth=depth - 1) for one in inside)
