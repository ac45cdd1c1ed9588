"""A loader whose order is a function of (seed, epoch).

Its place in the epoch can be saved and restored. A plain `DataLoader` takes its order from the global random state. A run
resumed in mid-epoch therefore starts the epoch again in another order. This loader never reads the global state. Lightning's fit
loop saves and restores its place through `state_dict` and `load_state_dict`, so that a resumed run sees exactly the remaining
batches.
"""

import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_unified.data import settings
from lightning_unified.data.worker_start import RowsOfBatches, batches_of, start_server

__all__ = ["BatchRows", "EpochClock", "LoaderOptions", "ResumableLoader", "plan_epoch"]

_WINDOW = 50  # batches whose rows are sorted by length together: enough to save padding, few enough to stay random


class BatchRows(Dataset[dict[str, Tensor]], ABC):
    """Rows that return a whole batch at a time.

    Attributes:
        bucket_of: A number for each row that grows with its length.
        checksum: Checksum of the rows' content; an order of batches belongs to these rows only.
    """

    bucket_of: np.ndarray
    checksum: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of the rows `indices`; -1 stands for a row of padding only."""

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}


def plan_epoch(
    bucket_of: np.ndarray, *, batch_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> list[list[int]]:
    """Return the row numbers of every batch of an epoch.

    Every batch has `batch_size` rows; the last one has the remaining rows, unless `drop_last`. Rows are drawn at random and
    sorted by bucket within windows of 50 batches. Then the batches are put into random order: a batch has rows of similar
    length, and no length comes first. Rows left over are random ones, not the longest.

    Args:
        bucket_of: The bucket of each row, any number that grows with its length.
        batch_size: Rows of a batch.
        seed: With `epoch`, decides the order.
        epoch: See `seed`.
        shuffle: False for one fixed order, sorted by bucket.
        drop_last: Leave out the rows that do not fill a batch.
    """
    generator = np.random.default_rng([seed, epoch])
    num_rows = len(bucket_of)
    order = generator.permutation(num_rows) if shuffle else np.argsort(bucket_of, kind="stable")
    whole = num_rows - num_rows % batch_size
    batches = []
    for start in range(0, whole, batch_size * _WINDOW):
        window = order[start : min(start + batch_size * _WINDOW, whole)]
        window = window[np.argsort(bucket_of[window], kind="stable")]
        batches.extend(window.reshape(-1, batch_size).tolist())
    if shuffle:
        batches = [batches[place] for place in generator.permutation(len(batches))]
    if whole < num_rows and not drop_last:
        batches.append(order[whole:].tolist())
    return batches


class EpochClock:
    """The epoch that Lightning sets, in the place where Lightning looks for it.

    Lightning calls `loader.batch_sampler.sampler.set_epoch` (lightning/fabric/utilities/data.py, 2.6).
    """

    def __init__(self) -> None:
        self.epoch = 0

    @property
    def sampler(self) -> "EpochClock":
        """Itself."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """How rows become batches: their number, their order, and the processes that make them.

    Attributes:
        batch_size: Rows of a batch over all ranks, the effective batch.
        val_batch_size: Rows of a validation batch; None for `batch_size`.
        shuffle: Whether each epoch has a new order.
        seed: Decides the orders.
        drop_last: Whether rows that do not fill a batch are left out.
        num_workers: Processes that make batches; 0 for none. The next three options have no effect then.
        persistent_workers: Whether workers live from epoch to epoch.
        prefetch_factor: Batches that each worker makes ahead; None for PyTorch's 2.
        start_method: `"fork"`, `"spawn"` or `"forkserver"`; None for the system's own.
        pin_memory: Whether batches are copied into page-locked memory; those made while processes start are not.

    Raises:
        ValueError: If an option makes no sense.
    """

    batch_size: int
    val_batch_size: int | None = None
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    num_workers: int = 0
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    start_method: str | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        settings.check_counts(batch_size=self.batch_size)
        settings.check_counts(optional=True, val_batch_size=self.val_batch_size, prefetch_factor=self.prefetch_factor)
        settings.check_counts(smallest=0, seed=self.seed, num_workers=self.num_workers)
        settings.check_switches(
            persistent_workers=self.persistent_workers, pin_memory=self.pin_memory, drop_last=self.drop_last
        )
        if self.start_method is not None:
            settings.check_one_of("start_method", self.start_method, multiprocessing.get_all_start_methods())

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "LoaderOptions":
        """Return the loader's options among a data module's arguments; ignore the others."""
        return cls(**{name: arguments[name] for name in cls.__dataclass_fields__ if name in arguments})

    @property
    def rows_of_validation(self) -> int:
        """Rows of a validation batch."""
        return self.val_batch_size or self.batch_size

    def validation(self) -> "LoaderOptions":
        """Return the options of a loader of validation or test rows.

        Such a loader gives every row once, in a fixed order.
        """
        return replace(self, batch_size=self.rows_of_validation, shuffle=False, drop_last=False)

    def workers(self) -> dict[str, Any]:
        """Return the arguments of `DataLoader` about processes and memory."""
        arguments: dict[str, Any] = {"num_workers": self.num_workers, "pin_memory": self.pin_memory}
        if self.num_workers:
            arguments |= {
                "persistent_workers": self.persistent_workers,
                "prefetch_factor": self.prefetch_factor,
                "multiprocessing_context": self.start_method,
            }
        return arguments


class ResumableLoader:
    """An iterable of batches that can save its place in the epoch and return to it.

    The loader decides nothing before the first batch: Lightning makes the first iterator before it sets the epoch, and workers
    start with the batches that are left. `len()` is that of the whole epoch, as Lightning expects. Under several processes, each
    rank takes every world_size-th row of a batch, so `batch_size` stays the effective batch. A row of padding without targets
    fills up a last batch that the ranks cannot share evenly.

    Args:
        rows: The rows; pickled for workers that are spawned.
        options: Batch size, order and workers.
        rank: Rank of this process.
        world_size: Number of processes that share a batch.
        processed: Returns how many batches of the running epoch the trainer has finished. After a resume, the loader repeats a
            batch that it gave but that was not finished (the step raised). None counts the batches given.
    """

    def __init__(
        self,
        rows: BatchRows,
        options: LoaderOptions,
        *,
        rank: int = 0,
        world_size: int = 1,
        processed: Callable[[], int] | None = None,
    ) -> None:
        self.rows = rows
        self.options = options
        self.batch_size = options.batch_size
        self.batch_sampler = EpochClock()
        self._rank, self._world_size = rank, world_size
        self._processed = processed
        self._loader: DataLoader | None = None
        self._epoch = 0
        self._position = 0
        self._resume_at: tuple[int, int] | None = None

    def __len__(self) -> int:
        num_rows = len(self.rows)
        return num_rows // self.batch_size if self.options.drop_last else -(-num_rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._begin()
        loader = self._loader
        if loader is None:
            # its own generator: without one, a DataLoader draws a number from the global state each epoch
            loader = self._loader = DataLoader(
                self.rows,
                batch_sampler=RowsOfBatches(),
                collate_fn=_as_it_is,
                generator=torch.Generator().manual_seed(self.options.seed),
                **self.options.workers(),
            )
            start_server(self.options)
        for batch in batches_of(loader, self.rows, self._plan()[self._position :]):
            self._position += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; without a call, epochs follow each other."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place: the epoch, its finished batches, and the values that set the order."""
        epoch, position = self._epoch, self._position
        if self._resume_at is not None:
            epoch, position = self._resume_at
        elif self._processed is not None:
            position = min(position, self._processed())
        if self.batch_sampler.epoch > epoch:
            epoch, position = self.batch_sampler.epoch, 0
        if position >= len(self):
            epoch, position = epoch + 1, 0
        return {"epoch": epoch, "position": position, "order": self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a place: the next iteration begins there.

        Raises:
            ValueError: If the place is in mid-epoch and this loader has another order.
        """
        saved, here = state_dict["order"], self._order()
        if state_dict["position"] and saved != here:
            changed = ", ".join(
                f"{name} {saved.get(name)} -> {value}" for name, value in here.items() if saved.get(name) != value
            )
            raise ValueError(
                f"the checkpoint was saved after batch {state_dict['position']} of epoch {state_dict['epoch']}, in an order that "
                f"this loader does not have ({changed}); set these as they were, or resume from the end of an epoch."
            )
        self._resume_at = (state_dict["epoch"], state_dict["position"])
        self.batch_sampler.set_epoch(state_dict["epoch"])

    @property
    def _iterator(self) -> Any:
        """The running workers.

        Lightning shuts them down through this attribute (CombinedLoader.reset, 2.6).
        """
        return None if self._loader is None else self._loader._iterator

    @_iterator.setter
    def _iterator(self, _: None) -> None:
        self._loader = None

    def _begin(self) -> None:
        """Set epoch and position of an iteration that starts now."""
        epoch_set = self.batch_sampler.epoch
        if self._resume_at is not None:
            epoch, position = self._resume_at
            self._resume_at = None
            self._epoch, self._position = epoch_set, position if epoch_set == epoch else 0
            return
        if epoch_set == self._epoch and self._position >= len(self):
            epoch_set += 1
            self.batch_sampler.set_epoch(epoch_set)
        self._epoch, self._position = epoch_set, 0

    def _plan(self) -> list[list[int]]:
        batches = plan_epoch(
            self.rows.bucket_of,
            batch_size=self.batch_size,
            seed=self.options.seed,
            epoch=self._epoch,
            shuffle=self.options.shuffle,
            drop_last=self.options.drop_last,
        )
        if self._world_size == 1:
            return batches
        filled = [batch + [-1] * (-len(batch) % self._world_size) for batch in batches]
        return [batch[self._rank :: self._world_size] for batch in filled]

    def _order(self) -> dict[str, Any]:
        """Return the settings and the checksum on which the order of batches depends."""
        return {
            "rows": len(self.rows),
            "batch_size": self.batch_size,
            "seed": self.options.seed,
            "shuffle": self.options.shuffle,
            "drop_last": self.options.drop_last,
            "content": self.rows.checksum,
        }


def _as_it_is(batch: Any) -> Any:
    return batch
