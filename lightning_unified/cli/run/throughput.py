"""Throughput of a run: samples, tokens and seconds of training, without validation."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_unified.callbacks.loops import logged_step

__all__ = ["Throughput"]


class Throughput(Callback):
    """Count samples, scored tokens and seconds of this process's batches, and log the speed.

    Tokens are labels other than -100 under the batch key `labels`, else the True entries of a boolean `mask`. A batch without
    either counts samples only. The sum stays on the device until it is read, so no step waits for it. Every `log_every_n_steps`
    batches, `speed/samples_per_second` and `speed/seconds_per_batch` are logged, without validation.

    Attributes:
        first_step: The optimizer step at which this process started.
        fields: Names of the entries of the first training batch; empty before it, and if it is no dict.
        samples: Rows trained on.
        seconds: Time between the first and the last training batch, without validation.
        duration: Time from the start of training to its end, with validation.
        validated_at: The optimizer step of the last finished validation, None before the first.
    """

    def __init__(self) -> None:
        self.first_step = 0
        self.fields: tuple[str, ...] = ()
        self.samples = 0
        self._batches = 0
        self.seconds = 0.0
        self.duration = 0.0
        self.validated_at: int | None = None
        self._tokens: torch.Tensor | None = None
        self._since: float | None = None
        self._began: float | None = None
        self._logged = (0, 0, 0.0)

    @property
    def started(self) -> bool:
        """Whether training has started."""
        return self._began is not None

    @property
    def tokens(self) -> int | None:
        """Scored tokens trained on, None if the batches have no labels.

        Reading it waits for the device.
        """
        return None if self._tokens is None else int(self._tokens)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self.first_step = time.monotonic(), trainer.global_step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.duration = time.monotonic() - (self._began or 0.0)
        if trainer.world_size > 1:
            self._add_ranks(trainer)

    def _add_ranks(self, trainer: Trainer) -> None:
        """Count what all ranks trained on."""
        device = trainer.strategy.root_device
        mine = torch.tensor([self.samples, self.tokens or 0], dtype=torch.int64, device=device)
        samples, tokens = (int(total) for total in trainer.strategy.reduce(mine, reduce_op="sum"))
        self.samples = samples
        self._tokens = None if self._tokens is None else torch.tensor(tokens)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._since is None:
            self._since = time.monotonic()
            self.fields = tuple(map(str, batch)) if isinstance(batch, dict) else ()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._advance(restart=True)
        self.samples += _rows(batch)
        scored = _tokens(batch)
        if scored is not None:
            self._tokens = scored if self._tokens is None else self._tokens + scored
        self._batches += 1
        every = int(getattr(trainer, "log_every_n_steps", 0))
        if every and self._batches % every == 0:
            self._log(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._advance(restart=False)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated_at = trainer.global_step

    def _log(self, trainer: Trainer) -> None:
        """Log the speed since the last log.

        No batch in between waits for the device, so only their mean is meaningful.
        """
        now = (self._batches, self.samples, self.seconds)
        batches, samples, seconds = (a - b for a, b in zip(now, self._logged, strict=True))
        self._logged = now
        if seconds > 0:
            metrics = {"speed/samples_per_second": samples / seconds, "speed/seconds_per_batch": seconds / batches}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=logged_step(trainer))

    def _advance(self, *, restart: bool) -> None:
        now = time.monotonic()
        if self._since is not None:
            self.seconds += now - self._since
        self._since = now if restart else None


def _tokens(batch: Any) -> torch.Tensor | None:
    """Return the number of tokens that a batch trains on, None if unknown."""
    if not isinstance(batch, dict):
        return None
    labels, mask = batch.get("labels"), batch.get("mask")
    read = batch.get("attention_mask")
    if isinstance(labels, torch.Tensor) and labels.ndim == 1 and isinstance(read, torch.Tensor):
        return (read != 0).sum()  # one label per text: count the tokens of the texts
    if isinstance(labels, torch.Tensor):
        return (labels != -100).sum()
    return mask.sum() if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool else None


def _rows(batch: Any) -> int:
    """Return the leading size of the first tensor in `batch`."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    members = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((rows for rows in map(_rows, members) if rows), 0)
