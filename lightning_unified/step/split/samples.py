"""Find the number of samples in a data loader's batches, from its samplers."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, default_collate
from torch.utils.data.dataloader import _DatasetKind

from lightning_unified.step.split.containers import entries_of
from lightning_unified.step.split.kinds import ARRAY_LIKE, kind_of

__all__ = ["UNKNOWN", "LoaderSamples", "SubBatch", "samples_by_path", "samples_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSamples:
    """The samples in a batch of one loader, as far as the loader shows them.

    Attributes:
        counts: The possible numbers of samples in a batch, the usual one first; empty if unknown.
        collates: Whether the loader's `collate_fn` returns a list of columns or of rows; None if the function is unknown.
        constants: The tensors and arrays that the loader's `collate_fn` or dataset holds, and may put into each batch.
    """

    counts: tuple[int, ...] = ()
    collates: Literal["columns", "rows"] | None = None
    constants: tuple[Any, ...] = field(default=(), repr=False)

    def is_constant(self, value: Any) -> bool:
        """Return whether the loader holds `value` itself, or an equal tensor of real numbers."""
        if not isinstance(value, np.ndarray) and any(one is value for one in self.constants):
            return True
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or not value.numel():
            return False
        alike = [one for one in self.constants if tuple(one.shape) == tuple(value.shape) and _has_numbers(one)]
        if value.layout != torch.strided or not alike or bool((value == value.flatten()[0]).all()):
            return False  # a constant tensor may equal another by chance, such as labels all zero or all one
        return any(torch.equal(torch.as_tensor(one).to(value), value) for one in alike)


UNKNOWN = LoaderSamples()
SubBatch = tuple[str, Callable[[], LoaderSamples]]  # its path, and a function that returns the samples of its loader


def samples_of(loader: Any) -> LoaderSamples:
    """Return the known properties of the batches of `loader`.

    The batch sampler of a plain `DataLoader` gives the number of samples; over an iterable dataset, the number in all batches but the last.
    A batch sampler of another class may give any number, and so may an iterable of batches.
    """
    collate, dataset = getattr(loader, "collate_fn", None), getattr(loader, "dataset", None)
    named: Literal["columns", "rows"] | None = None
    if collate is default_collate:
        named = "columns"
    elif collate is list or collate is tuple:
        named = "rows"
    constants = tuple(_constants(collate, dataset))
    sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(sampler, "_batch_sampler", sampler)  # Lightning wraps it in predict
    size = getattr(sampler, "batch_size", None)
    if type(sampler) is not BatchSampler or not isinstance(size, int):
        return LoaderSamples(collates=named, constants=constants)
    total = _length(sampler.sampler)
    if total is None or getattr(loader, "_dataset_kind", None) == _DatasetKind.Iterable:
        return LoaderSamples(counts=(size,), collates=named, constants=constants)
    counts = [size] if total >= size else []
    if total % size and (not sampler.drop_last):
        counts.append(total % size)
    return LoaderSamples(counts=tuple(counts), collates=named, constants=constants)


def samples_by_path(trainer: L.Trainer | None, stage: str, loader: int, batch: Any) -> list[SubBatch]:
    """Return the sub-batches of `batch`, one per loader, with their paths.

    A batch of a single loader is one sub-batch with an empty path.

    Args:
        trainer: The running Trainer; None without one.
        stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        loader: The index of the batch's loader, if an evaluation runs several loaders one after another.
        batch: The batch that the step gets.
    """
    combined = None if trainer is None else _combined(trainer, stage)
    if combined is None or not combined.flattened:
        return [("", _unknown)]
    if combined._mode == "sequential":
        return [("", partial(samples_of, combined.flattened[loader]))]
    found = list(_with_paths(combined.iterables, ()))
    if len(found) == 1 and not found[0][0]:
        return [("", partial(samples_of, found[0][1]))]
    if all(_has(batch, keys) for keys, _ in found):
        return [(".".join(keys), partial(samples_of, one)) for keys, one in found]
    return [("", _unknown)]  # a hook has changed the structure of the sub-batches


def _unknown() -> LoaderSamples:
    return UNKNOWN


def _combined(trainer: L.Trainer, stage: str) -> CombinedLoader | None:
    if stage == "fit":
        loop: Any = trainer.fit_loop
    elif stage == "validate":
        in_fit = getattr(trainer.state.fn, "value", None) == "fit"
        loop = trainer.fit_loop.epoch_loop.val_loop if in_fit else trainer.validate_loop
    else:
        loop = trainer.test_loop if stage == "test" else trainer.predict_loop
    return getattr(loop, "_combined_loader", None)


def _with_paths(loaders: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    entries = None if isinstance(loaders, DataLoader) else entries_of(loaders)
    if entries is None:
        yield keys, loaders
        return
    for key, entry in entries:
        yield from _with_paths(entry, (*keys, str(key)))


def _has(batch: Any, keys: tuple[str, ...]) -> bool:
    for key in keys:
        entries = {str(name): entry for name, entry in entries_of(batch) or ()}
        if key not in entries:
            return False
        batch = entries[key]
    return True


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _constants(collate: Any, dataset: Any) -> Iterator[Any]:
    """Yield tensors, arrays and the like that `collate` names or `dataset` holds.

    Data with one entry per sample are skipped.
    """
    samples = _length(dataset)
    while hasattr(dataset, "dataset") and not isinstance(dataset, DataLoader):
        dataset = dataset.dataset  # of a `Subset`
    everything = {samples, _length(dataset)} - {None}
    held = list(_named_by(collate))
    if samples is not None:  # a dataset without a length may yield its tensors themselves as samples
        held += [*_values_of(dataset), *_named_by(getattr(type(dataset), "__getitem__", None))]
    for value in held:
        is_array = isinstance(value, (Tensor, np.ndarray)) or kind_of(value) is ARRAY_LIKE
        if is_array and value.shape and value.shape[0] not in everything:
            yield value


def _has_numbers(constant: Any) -> bool:
    return isinstance(constant, Tensor) or (isinstance(constant, np.ndarray) and constant.dtype.kind in "biuf")


def _named_by(function: Any) -> Iterator[Any]:
    """Yield the values that a function can read beside its arguments.

    These are globals that it names, closure variables, defaults, bound arguments, and the attributes of its object.
    """
    while isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    if inspect.ismethod(function):
        yield from _values_of(function.__self__)
        function = function.__func__
    if inspect.isfunction(function):
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
        yield from function.__defaults__ or ()
    elif function is not None and not isinstance(function, type):
        yield from _values_of(function)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def _values_of(thing: Any) -> list[Any]:
    return list(getattr(thing, "__dict__", {}).values())
