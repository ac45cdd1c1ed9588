"""Base of the data modules: rows on resumable loaders, and a fixed tokenizer."""

import sys
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

from lightning import LightningDataModule
from tokenizers import Tokenizer
from torch import Tensor
from typing_extensions import override

from lightning_unified.data.loader import BatchRows, LoaderOptions, ResumableLoader
from lightning_unified.data.worker_start import start_server

__all__ = ["ResumableData"]

RowsT = TypeVar("RowsT", bound=BatchRows)


class ResumableData(LightningDataModule, ABC, Generic[RowsT]):
    """Base of the data modules: training and validation rows on loaders that can be resumed.

    The arguments of the subclass's constructor become hyperparameters. Its `_prepared` reads the data at its first use; the result has
    the attributes `tokenizer`, `train` and `validation`.

    Args:
        options: Batch size, order and workers; a data module takes them as arguments of the same names.

    Attributes:
        batch_work: The work of a batch, which decides the number of loader processes: `"gather"`, a look-up in arrays in
            memory, or `"compute"`, about the time of a step.
    """

    batch_work: ClassVar[Literal["gather", "compute"]] = "gather"
    _prepared: Any

    def __init__(self, options: LoaderOptions) -> None:
        super().__init__()
        # not logged: Lightning refuses a module and a data module that log one name with two values
        self.save_hyperparameters(ignore=["options"], logger=False)
        self.options = options
        self.batch_size = options.batch_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; `to_str()` returns its JSON."""
        return self._prepared.tokenizer

    @property
    def rows(self) -> tuple[RowsT, RowsT]:
        """The training and the validation rows."""
        return self._prepared.train, self._prepared.validation

    @abstractmethod
    def _zeros(self, rows: int) -> dict[str, Tensor]:
        """Return a batch of zeros with the full length; no file is read."""

    @abstractmethod
    def describe_line(self) -> str:
        """Return one line about the data for the start of a run: documents read, left out, split."""

    def example_batch(self) -> dict[str, Tensor]:
        """Return a training batch of zeros with full size and length; no file is read."""
        return self._zeros(self.batch_size)

    def example_validation_batch(self) -> dict[str, Tensor]:
        """Return a validation batch of zeros."""
        return self._zeros(self.options.rows_of_validation)

    @property
    def _world_size(self) -> int:
        """Number of processes that share a batch."""
        return 1 if self.trainer is None else self.trainer.world_size

    @property
    def _rank(self) -> int:
        """Rank of this process."""
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, which can be smaller than requested."""
        return self.tokenizer.get_vocab_size()

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read, split and encode once; reading the vocabulary earlier does the same."""
        start_server(self.options)
        _ = self.rows

    @override
    def train_dataloader(self) -> ResumableLoader:
        rows, _ = self.rows
        if self.options.drop_last and len(rows) < self.batch_size:
            raise ValueError(
                f"the training split has {len(rows)} rows, fewer than data.batch_size={self.batch_size}, and data.drop_last leaves "
                "out rows that do not fill a batch; lower data.batch_size or the length of a row, or set data.drop_last=false."
            )
        overfit = self.trainer is not None and getattr(self.trainer, "overfit_batches", 0) > 0
        return self._loader(rows, replace(self.options, shuffle=not overfit))

    @override
    def val_dataloader(self) -> ResumableLoader:
        return self._loader(self.rows[1], self.options.validation())

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.to_str()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["tokenizer"] != self.tokenizer.to_str():
            raise ValueError(
                "the checkpoint was trained with another tokenizer, so its token ids mean other texts here; use the data it was "
                "trained with, or give its tokenizer by data.tokenizer_file."
            )

    def _check_shared(self, **batch_sizes: int) -> None:
        """Raise unless the processes can share batches of these sizes evenly."""
        for name, size in batch_sizes.items():
            if size % self._world_size:
                raise ValueError(
                    f"data.{name}={size} cannot be shared by {self._world_size} processes; give a multiple of {self._world_size}: it is "
                    "the effective batch, over all of them."
                )

    def _loader(self, rows: BatchRows, options: LoaderOptions) -> ResumableLoader:
        """Return a loader of this process's share of each batch."""
        self._check_shared(batch_size=options.batch_size)
        return ResumableLoader(
            rows,
            options,
            rank=self._rank,
            world_size=self._world_size,
            processed=self._processed_batches if options.shuffle else None,
        )

    def _processed_batches(self) -> int:
        """Return the number of this epoch's batches that the fit loop has finished.

        A resume uses the same count.
        """
        if self.trainer is None:
            return sys.maxsize
        # declared as the tracker's base class, which has no `processed` (lightning/pytorch/loops/progress.py, 2.6)
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.processed  # pyright: ignore[reportAttributeAccessIssue]
