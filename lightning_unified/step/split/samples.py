"""Find how many samples a data loader puts into a batch, from its samplers."""

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

__all__ = ["UNKNOWN", "LoaderSamples", "SubBatch", "samples_by_path", "samples_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSamples:
    """Samples in a batch of one loader.

    Attributes:
        counts: The numbers that a batch may have, the usual one first; empty if the loader does not tell.
        collates: What the entries of a list are that the loader's `collate_fn` returns; None if the function is not known.
        constants: Tensors and arrays that the loader's `collate_fn` or dataset holds, and may put into each batch.
    """

    counts: tuple[int, ...] = ()
    collates: Literal["columns", "rows"] | None = None
    constants: tuple[Any, ...] = field(default=(), repr=False)

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether the loader holds `tensor` itself, or real numbers that equal it."""
        if any(one is tensor for one in self.constants):
            return True
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
            return False
        alike = [one for one in self.constants if tuple(one.shape) == tuple(tensor.shape)]
        if not alike or bool((tensor == tensor.flatten()[0]).all()):
            return False  # labels may be equal, all zero or all one, by chance
        return any(torch.equal(torch.as_tensor(one).to(tensor), tensor) for one in alike)


UNKNOWN = LoaderSamples()
SubBatch = tuple[str, Callable[[], LoaderSamples]]  # its path, and what its loader tells


def samples_of(loader: Any) -> LoaderSamples:
    """Return what is known of the batches of `loader`.

    A `DataLoader` with a plain batch sampler tells the number of samples, one over an iterable dataset the number in all batches but
    the last. A batch sampler of another class may give any number, and so may an iterable of batches.
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
    """Return the sub-batches of `batch`, each of one loader, by path; one with an empty path for a batch of one loader.

    Args:
        trainer: That runs; None if none does.
        stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        loader: The index of the loader that the batch comes from, where an evaluation runs several one after another.
        batch: As its step gets it.
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
    return [("", _unknown)]  # a hook has made another structure of the sub-batches


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
    """Yield tensors that the function names or the dataset holds, except those with an entry for each sample."""
    samples = _length(dataset)
    while hasattr(dataset, "dataset") and not isinstance(dataset, DataLoader):
        dataset = dataset.dataset  # of a `Subset`
    everything = {samples, _length(dataset)} - {None}
    held = list(_named_by(collate))
    if samples is not None:  # a dataset without a length may give its tensors as they are
        held += [*_values_of(dataset), *_named_by(getattr(type(dataset), "__getitem__", None))]
    for value in held:
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim and len(value) not in everything:
            yield value


def _named_by(function: Any) -> Iterator[Any]:
    """Yield what a function reads beside its arguments: globals, closure, defaults, the object that it is a method of."""
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
