"""Fake batches: make a batch of any number of rows and any row length from a real batch."""

from collections import Counter
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._mode_utils import no_dispatch

from lightning_unified.errors import DryRunError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.planner.fake.fake_copy import fake_copy, fake_tensor
from lightning_unified.planner.fake.known_values import set_value
from lightning_unified.step.split import BatchSplitter, planning_splitter, tensors_in
from lightning_unified.step.split.containers import (
    PLAIN,
    entries_of,
    is_sequence,
    is_tensor_collection,
    joined,
    with_entries,
)
from lightning_unified.step.split.kinds import ARRAY_LIKE, TENSOR, kind_of
from lightning_unified.step.split.roles import Role, Roles

__all__ = ["Template", "row_length"]

_KNOWN = 1 << 18  # entries: larger integer tensors lose their values; lengths, labels and masks keep them


class Template:
    """Makes fake batches like a real one, with any number of rows.

    It repeats or drops rows, and keeps only the shapes of floating-point tensors.

    Integer tensors keep their values, and repeated rows repeat them. So a step reads lengths, labels and masks that occur in real data.

    Args:
        module: The module of the batches.
        batch: A batch as `training_step` gets it, on any device.
        rules: The module's rules for batches; `rows.split` makes batches of fewer rows.
        splitter: Knows the rows of such batches; None for a new splitter.

    Attributes:
        rows: Rows of the batch; None if they are unknown or cannot be split.
        length: Positions of a row, if rows are sequences; else None.
        roles: The roles of the batch's entries, by path.
    """

    def __init__(
        self, module: L.LightningModule, batch: Any, rules: MicroBatchRules, *, splitter: BatchSplitter | None = None
    ) -> None:
        self._batch, self._name = batch, type(module).__name__
        self._splitter = splitter or planning_splitter(module, rules)
        self._splits_itself = rules.rows.split is not None
        shape = self._splitter.shape(batch)
        known = shape is not None and self._splitter.refusal(batch, shape.rows) is None
        self.rows = shape.rows if known and shape is not None else None
        self.roles = self._splitter.roles()
        self.length = None if self.rows is None else row_length(batch, self.rows)

    def of(self, rows: int, *, length: int | None, device: torch.device) -> Any:
        """Return a fake batch; call it inside `fake_world`.

        Args:
            rows: Rows of the fake batch.
            length: Positions of a row; None keeps the length.
            device: The device that its tensors report.

        Raises:
            DryRunError: If no batch of that size can be made from the real one.
        """
        if length is not None and self.length is None:
            raise DryRunError(
                f"length={length}: the rows of the batch given to {self._name} have no dimension of positions; leave length out."
            )
        if self.rows is None:
            return fake_copy(self._batch, device=device)
        batch, known = self._batch, self.rows
        if rows != known and (self._splits_itself or _holds_special_kinds(batch)):
            batch, known = self._split(rows), rows
        resize = _Resize(
            self.roles, rows=known, new_rows=rows, length=self.length, new_length=length or self.length, device=device
        )
        return resize(batch)

    def _split(self, rows: int) -> Any:
        assert self.rows is not None
        if rows > self.rows:
            raise DryRunError(
                f"a batch of {rows} rows cannot be made from one of {self.rows}: rows in batches of {self._name} cannot be repeated; "
                f"give a batch of at least {rows} rows."
            )
        with no_dispatch():
            return self._splitter.split(self._batch, 0, rows, rows=self.rows)


class _Resize:
    """Makes a fake copy of all entries of a batch.

    Entries with a row dimension get the new number of rows and positions.
    """

    def __init__(
        self,
        roles: Roles,
        *,
        rows: int,
        new_rows: int,
        length: int | None,
        new_length: int | None,
        device: torch.device,
    ) -> None:
        self._roles, self._device = roles, device
        self._rows, self._new_rows, self._length, self._new_length = rows, new_rows, length, new_length

    def __call__(self, value: Any, path: str = "") -> Any:
        if isinstance(value, Tensor) and kind_of(value) is TENSOR:
            return self._tensor(value, batched=self._roles.get((path, "leaf")) is Role.ROWS)
        if isinstance(value, np.ndarray) and self._roles.get((path, "leaf")) is Role.ROWS:
            return value[np.arange(self._new_rows) % self._rows]
        if isinstance(value, PackedSequence):
            parts = (None if part is None else fake_tensor(part, device=self._device) for part in value)
            return type(value)(*parts)  # pyright: ignore[reportArgumentType]
        if is_sequence(value) and self._roles.get((path, "list")) is Role.ROWS:
            return type(value)(self._plain_copy(value[index % self._rows]) for index in range(self._new_rows))  # pyright: ignore[reportArgumentType]
        entries = None if isinstance(value, PLAIN) or _is_whole(value) else entries_of(value)
        if entries is not None:
            return with_entries(value, [(key, self(entry, joined(path, key))) for key, entry in entries])
        return self._plain_copy(value)

    def _plain_copy(self, value: Any) -> Any:
        return value if isinstance(value, PLAIN) else fake_copy(value, device=self._device)

    def _tensor(self, tensor: Tensor, *, batched: bool) -> Tensor:
        shape = list(tensor.shape)
        for index in range(int(batched), len(shape)):
            if shape[index] == self._length and self._new_length is not None:
                shape[index] = self._new_length
        if batched:
            shape[0] = self._new_rows
        if shape == list(tensor.shape):
            return fake_tensor(tensor, device=self._device)
        fake = torch.empty_strided(shape, _strides(tensor, shape), dtype=tensor.dtype, device=self._device)
        if not tensor.is_floating_point() and not tensor.is_meta and fake.numel() <= _KNOWN:
            with no_dispatch():
                value = tensor.detach().cpu()
                for index, (size, new_size) in enumerate(zip(tensor.shape, shape, strict=True)):
                    if size != new_size:
                        value = value.index_select(index, torch.arange(new_size) % size)
            set_value(fake, value.clone() if value is tensor else value)
        return fake


def _strides(tensor: Tensor, shape: list[int]) -> list[int]:
    """Return the strides of a dense tensor of `shape` with the dimension order of `tensor`."""
    strides, step = [1] * len(shape), 1
    for index in sorted(range(len(shape)), key=lambda index: (tensor.stride(index), -index)):
        strides[index] = step
        step *= max(shape[index], 1)
    return strides


def row_length(batch: Any, rows: int) -> int | None:
    """Return the most frequent second dimension of the batch's integer tensors.

    The result is None if there is none.
    """
    votes = Counter(
        tensor.shape[1]
        for tensor in tensors_in(batch)
        if not tensor.is_nested
        and tensor.dim() > 1
        and tensor.shape[0] == rows
        and not tensor.is_floating_point()
        and tensor.shape[1] > 1
    )
    return votes.most_common(1)[0][0] if votes else None


def _is_whole(value: Any) -> bool:
    """Return whether `value` is a `TensorDict` with rows, which is copied as a whole."""
    return is_tensor_collection(value) and len(value.batch_size) > 0


def _holds_special_kinds(value: Any) -> bool:
    """Return whether a batch holds entries whose rows cannot be repeated.

    These are packed sequences, graphs and nested tensors.
    """
    if isinstance(value, PLAIN):
        return False
    kind = kind_of(value)
    if kind is not None:
        return kind not in (TENSOR, ARRAY_LIKE) and not isinstance(value, np.ndarray)
    return any(_holds_special_kinds(entry) for _, entry in entries_of(value) or ())
