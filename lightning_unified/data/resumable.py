"""What data modules of ours share: rows of two sides on loaders that know their place, and a tokenizer that must not change."""

import sys
from abc import ABC, abstractmethod
from typing import Any

from lightning import LightningDataModule
from tokenizers import Tokenizer
from typing_extensions import override

from lightning_unified.data.loader import BatchRows, ResumableLoader

__all__ = ["ResumableData"]


class ResumableData(LightningDataModule, ABC):
    """Training and validation rows on `ResumableLoader`s; the arguments are those of `TextData` of the same names."""

    def __init__(
        self,
        *,
        batch_size: int,
        val_batch_size: int | None,
        seed: int,
        drop_last: bool,
        num_workers: int,
        persistent_workers: bool,
        prefetch_factor: int | None,
        start_method: str | None,
        pin_memory: bool,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._val_batch_size = val_batch_size or batch_size
        self._seed = seed
        self._drop_last = drop_last
        self._loader_arguments: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": persistent_workers,
            "prefetch_factor": prefetch_factor,
            "start_method": start_method,
            "pin_memory": pin_memory,
        }

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """What gives the ids; `to_str()` is its JSON."""

    @property
    @abstractmethod
    def rows(self) -> tuple[BatchRows, BatchRows]:
        """The rows to learn from, and those to be judged by."""

    @property
    def vocab_size(self) -> int:
        """Tokens there are, which can be fewer than were asked for."""
        return self.tokenizer.get_vocab_size()

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read, split and encode; the first call does the work, and so does asking for the vocabulary before it."""
        _ = self.rows

    @override
    def train_dataloader(self) -> ResumableLoader:
        rows, _ = self.rows
        if self._drop_last and len(rows) < self.batch_size:
            raise ValueError(
                f"the training split has {len(rows)} rows, fewer than data.batch_size={self.batch_size}, and data.drop_last leaves "
                "out what does not fill a batch; lower data.batch_size or the length of a row, or set data.drop_last=false."
            )
        overfit = self.trainer is not None and getattr(self.trainer, "overfit_batches", 0) > 0
        return self._loader(rows, self.batch_size, shuffle=not overfit, drop_last=self._drop_last)

    @override
    def val_dataloader(self) -> ResumableLoader:
        return self._loader(self.rows[1], self._val_batch_size, shuffle=False, drop_last=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.to_str()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["tokenizer"] != self.tokenizer.to_str():
            raise ValueError(
                "the checkpoint was trained with another tokenizer, so its token ids mean other things here; use the data it was "
                "trained with, or give its tokenizer by data.tokenizer_file."
            )

    def _loader(self, rows: BatchRows, batch_size: int, *, shuffle: bool, drop_last: bool) -> ResumableLoader:
        world_size = 1 if self.trainer is None else self.trainer.world_size
        if batch_size % world_size:
            raise ValueError(
                f"data.batch_size={batch_size} cannot be shared by {world_size} processes; give a multiple of {world_size}: it is "
                "the effective batch, over all of them."
            )
        return ResumableLoader(
            rows,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self._seed,
            drop_last=drop_last,
            rank=0 if self.trainer is None else self.trainer.global_rank,
            world_size=world_size,
            processed=self._processed_batches if shuffle else None,
            **self._loader_arguments,
        )

    def _processed_batches(self) -> int:
        """Return the batches of this epoch that the fit loop is done with: its own count for a resume."""
        if self.trainer is None:
            return sys.maxsize
        # declared as the tracker's base class, which has no `processed` (lightning/pytorch/loops/progress.py, 2.6)
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.processed  # pyright: ignore[reportAttributeAccessIssue]
