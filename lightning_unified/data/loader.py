"""Batches in an order that is a function of (seed, epoch), from a place that can be saved and gone back to.

Why not a plain `DataLoader`: it takes its order from the global random state, so a run that is resumed in mid-epoch begins
the epoch anew in another order. This loader never touches the global state, and Lightning's fit loop saves and restores its
place through `state_dict` and `load_state_dict`, so that a resumed run sees the batches that were left and no others.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

__all__ = ["BatchRows", "EpochClock", "ResumableLoader", "plan_epoch"]

_WINDOW = 50  # batches whose rows are sorted by length together: enough to save the padding, few enough to stay random


class BatchRows(Protocol):
    """Rows that make a whole batch at a time.

    Attributes:
        bucket_of: Of each row a number that grows with its length.
        checksum: Of all that the rows hold: an order of batches is of these rows and no others.
    """

    bucket_of: np.ndarray
    checksum: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...

    def __getitems__(self, indices: list[int], /) -> dict[str, Tensor]: ...


def plan_epoch(
    bucket_of: np.ndarray, *, batch_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> list[list[int]]:
    """Return the row numbers of every batch of an epoch.

    Every batch has `batch_size` rows, except that the last has what is left unless `drop_last`. Rows are drawn at random and
    sorted by bucket within windows of 50 batches, and the batches are then drawn in random order: rows of like length
    meet, and no length comes first. Rows that are left over are random ones, not the longest.

    Args:
        bucket_of: The bucket of each row, any number that grows with its length.
        batch_size: Rows of a batch.
        seed: With `epoch`, decides the order.
        epoch: See `seed`.
        shuffle: False for the same order every time, sorted by bucket.
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
    """The epoch, where Lightning looks for it: `loader.batch_sampler.sampler.set_epoch` (lightning/fabric/utilities/data.py, 2.6)."""

    def __init__(self) -> None:
        self.epoch = 0

    @property
    def sampler(self) -> "EpochClock":
        """Itself."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self.epoch = epoch


class ResumableLoader:
    """An iterable of batches that knows its place in the epoch.

    Nothing is decided before the first batch is asked for: Lightning makes the first iterator before it tells the epoch,
    and the workers start with the batches that are left. `len()` is always that of the whole epoch, as Lightning expects.
    Under several processes each rank takes every world_size-th row of a batch, so `batch_size` stays the effective one; a
    row of padding without targets fills up a last batch that does not divide.

    Args:
        rows: The rows; pickled to the workers where these are spawned.
        batch_size: Rows of a batch over all ranks.
        shuffle: A new order each epoch.
        seed: Decides the orders.
        drop_last: Leave out the rows that do not fill a batch.
        rank: Of this process.
        world_size: How many processes share a batch.
        num_workers: Processes that make batches; 0 for none. The next three arguments have no effect then.
        persistent_workers: Keep the workers from epoch to epoch.
        prefetch_factor: Batches that each worker makes ahead; None for 2.
        start_method: `"fork"`, `"spawn"` or `"forkserver"`; None for the system's own.
        pin_memory: Copy batches into page-locked memory.
        processed: Returns how many batches of the running epoch the trainer has finished. A batch that was handed out
            but not finished (the step raised) is then given again after a resume. None counts those handed out.
    """

    def __init__(
        self,
        rows: BatchRows,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        start_method: str | None = None,
        pin_memory: bool = False,
        processed: Callable[[], int] | None = None,
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.batch_sampler = EpochClock()
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._rank, self._world_size = rank, world_size
        self._processed = processed
        self._worker_arguments: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        if num_workers:
            self._worker_arguments |= {
                "persistent_workers": persistent_workers,
                "prefetch_factor": prefetch_factor,
                "multiprocessing_context": start_method,
            }
        self._batches = _Batches()
        self._loader: DataLoader | None = None
        self._epoch = 0
        self._position = 0
        self._resume_at: tuple[int, int] | None = None

    def __len__(self) -> int:
        num_rows = len(self.rows)
        return num_rows // self.batch_size if self._drop_last else -(-num_rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._begin()
        loader = self._loader
        if loader is None:
            # its own generator: a DataLoader without one draws a number from the global state each epoch
            loader = self._loader = DataLoader(
                self.rows,  # pyright: ignore[reportArgumentType]  # a Dataset is what has these methods, whatever its class
                batch_sampler=self._batches,
                collate_fn=_as_it_is,
                generator=torch.Generator().manual_seed(self._seed),
                **self._worker_arguments,
            )
        self._batches.planned = self._plan()[self._position :]
        for batch in loader:
            self._position += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; without it each finished epoch is followed by the next."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place: the epoch, and how many of its batches are done."""
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
        """Go back to a place: the next iteration begins there.

        Raises:
            ValueError: If the place is in mid-epoch and this loader has another order, so that it would be another place.
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
        """The running worker processes, where Lightning looks to shut them down (CombinedLoader.reset, 2.6)."""
        return None if self._loader is None else self._loader._iterator

    @_iterator.setter
    def _iterator(self, _: None) -> None:
        self._loader = None

    def _begin(self) -> None:
        """Settle epoch and position of an iteration that starts now."""
        told = self.batch_sampler.epoch
        if self._resume_at is not None:
            epoch, position = self._resume_at
            self._resume_at = None
            self._epoch, self._position = told, position if told == epoch else 0
            return
        if told == self._epoch and self._position >= len(self):
            told += 1
            self.batch_sampler.set_epoch(told)
        self._epoch, self._position = told, 0

    def _plan(self) -> list[list[int]]:
        batches = plan_epoch(
            self.rows.bucket_of,
            batch_size=self.batch_size,
            seed=self._seed,
            epoch=self._epoch,
            shuffle=self._shuffle,
            drop_last=self._drop_last,
        )
        if self._world_size == 1:
            return batches
        filled = [batch + [-1] * (-len(batch) % self._world_size) for batch in batches]
        return [batch[self._rank :: self._world_size] for batch in filled]

    def _order(self) -> dict[str, Any]:
        """Return what the order of batches depends on."""
        return {
            "rows": len(self.rows),
            "batch_size": self.batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "content": self.rows.checksum,
        }


class _Batches:
    """The batches of the running epoch that are left; a `DataLoader` asks for them anew each time it is iterated."""

    def __init__(self) -> None:
        self.planned: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.planned)

    def __len__(self) -> int:
        return len(self.planned)


def _as_it_is(batch: Any) -> Any:
    return batch
