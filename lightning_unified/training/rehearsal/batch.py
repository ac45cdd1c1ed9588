"""A fake batch of as many rows, and as long ones, as asked for, made after a real one."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._mode_utils import no_dispatch

from lightning_unified.errors import RehearsalError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.planning.shadow import fake_tensor, shadow
from lightning_unified.planning.values import set_value
from lightning_unified.training.cutter import Cutter
from lightning_unified.training.split import (
    _holds_columns,
    _is_record,
    _is_sequence,
    _with_fields,
    _with_items,
    cut,
    tensors_in,
)

__all__ = ["Template"]

_KNOWN = 1 << 18  # entries up to which whole numbers keep their values: lengths, labels, masks
_PLAIN = (str, bytes, int, float, type(None))


class Template:
    """What batches of a module look like: rows are repeated or left out, tensors of real numbers keep their shapes only.

    Whole numbers keep their values (those of rows that are repeated are repeated too), so that lengths, labels and masks that a step
    reads are ones that occur.

    Args:
        module: Whose batches they are.
        rules: Its rules; `rows.count` and `rows.split` are asked.
        batch: A batch as `training_step` gets it, on any device.

    Attributes:
        rows: Of the batch given; None for one that has no rows to count.
        length: Entries of a row, where rows are sequences; None elsewhere.
    """

    def __init__(self, module: L.LightningModule, batch: Any, rules: MicroBatchRules) -> None:
        self._batch, self._cutter, self._name = batch, Cutter(module, rules), type(module).__name__
        self._cuts_itself = rules.rows.split is not None
        shape = self._cutter.shape(batch)
        self.rows = None if shape is None else shape.rows
        self.length = None if self.rows is None else _length(batch, self.rows)

    def of(self, rows: int, *, length: int | None, device: torch.device) -> Any:
        """Return a fake batch; call it inside `fake_world`.

        Args:
            rows: Of the batch.
            length: Entries of a row; None leaves them as they are.
            device: Where its tensors pretend to be.

        Raises:
            RehearsalError: If a batch of that size cannot be made after the one given.
        """
        if length is not None and self.length is None:
            raise RehearsalError(
                f"length={length}: the rows of the batch given to {self._name} have no dimension of positions; leave length out."
            )
        if self.rows is None:
            return shadow(self._batch, device=device)
        batch, had = self._batch, self.rows
        if rows != had and (self._cuts_itself or any(True for _ in _packed_in(batch))):
            batch, had = self._cut(rows), rows
        resize = _Resize(had=had, rows=rows, length=self.length, asked=length or self.length, device=device)
        return resize(batch)

    def _cut(self, rows: int) -> Any:
        assert self.rows is not None
        if rows > self.rows:
            raise RehearsalError(
                f"a batch of {rows} rows cannot be made after one of {self.rows}, for batches of {self._name} are of a kind of their own; "
                f"give a batch of at least {rows} rows."
            )
        with no_dispatch():
            if self._cuts_itself:
                return self._cutter.cut(self._batch, 0, rows, rows=self.rows)
            return cut(self._batch, 0, rows, rows=self.rows)


class _Resize:
    """Makes a fake of everything in a batch, batched things with another number of rows or of positions."""

    def __init__(self, *, had: int, rows: int, length: int | None, asked: int | None, device: torch.device) -> None:
        self._had, self._rows, self._length, self._asked, self._device = had, rows, length, asked, device

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Mapping):
            return _with_items(value, {key: self(entry) for key, entry in value.items()})
        if isinstance(value, PackedSequence):
            return type(value)(*map(self._part, value))  # pyright: ignore[reportArgumentType]
        if _is_sequence(value):
            if len(value) == self._had and not _holds_columns(value, self._had):
                return type(value)(self._one(value[index % self._had]) for index in range(self._rows))
            parts = [self(entry) for entry in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if _is_record(value):
            return _with_fields(value, self)
        return value if isinstance(value, _PLAIN) else shadow(value, device=self._device)

    def _part(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else fake_tensor(tensor, device=self._device)

    def _one(self, entry: Any) -> Any:
        """Return what one row is in a list of rows."""
        return entry if isinstance(entry, _PLAIN) else shadow(entry, device=self._device)

    def _tensor(self, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        batched = bool(shape) and shape[0] == self._had
        for index in range(int(batched), len(shape)):
            if shape[index] == self._length and self._asked is not None:
                shape[index] = self._asked
        if batched:
            shape[0] = self._rows
        if shape == list(tensor.shape):
            return fake_tensor(tensor, device=self._device)
        fake = torch.empty_strided(shape, _strides(tensor, shape), dtype=tensor.dtype, device=self._device)
        if not tensor.is_floating_point() and not tensor.is_meta and fake.numel() <= _KNOWN:
            with no_dispatch():
                value = tensor.detach().cpu()
                for index, (had, asked) in enumerate(zip(tensor.shape, shape, strict=True)):
                    if had != asked:
                        value = value.index_select(index, torch.arange(asked) % had)
            set_value(fake, value.clone() if value is tensor else value)
        return fake


def _strides(tensor: Tensor, shape: list[int]) -> list[int]:
    """Return the strides of a dense tensor of `shape` whose dimensions lie in the order of those of `tensor`."""
    strides, step = [1] * len(shape), 1
    for index in sorted(range(len(shape)), key=lambda index: (tensor.stride(index), -index)):
        strides[index] = step
        step *= max(shape[index], 1)
    return strides


def _length(batch: Any, rows: int) -> int | None:
    """Return the second dimension that most of the batch's tensors of whole numbers have; no length where there is none."""
    votes = Counter(
        tensor.shape[1]
        for tensor in tensors_in(batch)
        if tensor.dim() > 1 and tensor.shape[0] == rows and not tensor.is_floating_point() and tensor.shape[1] > 1
    )
    return votes.most_common(1)[0][0] if votes else None


def _packed_in(value: Any) -> Any:
    if isinstance(value, PackedSequence):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _packed_in(entry)
    elif _is_sequence(value):
        for entry in value:
            yield from _packed_in(entry)
