"""The Trainer of a dry run: Lightning's own, without loggers, signals and checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.planner.dry_run.strategy import DryRunStrategy

__all__ = ["DryRunTrainer", "averaging", "batches_of", "tensors_held"]

_BATCHES = 1000  # of an epoch without a live Trainer; no dry run reaches its end
_LEAST_STEPS = 64  # batches and steps allowed even if the live Trainer allows fewer: the recording ends the dry run
_AVERAGING = (WeightAveraging, StochasticWeightAveraging)


class DryRunTrainer(L.Trainer):
    """Fits a fake copy until its loader ends the fit; uses no signal, logger or file.

    Args:
        live: The Trainer of the real fit, whose settings and data module the copy sees; or None.
        settings: Further arguments of `Trainer`.
    """

    def __init__(
        self,
        strategy: DryRunStrategy,
        *,
        live: L.Trainer | None,
        callbacks: list[Callback],
        settings: Mapping[str, Any],
    ) -> None:
        limits: dict[str, Any] = {"max_epochs": 1000}
        if live is not None:
            steps = live.max_steps
            limits = {
                "max_epochs": live.max_epochs or 1000,  # 0 would be no fit
                "max_steps": max(steps, _LEAST_STEPS) if steps > 0 else -1,
            }
        super().__init__(
            strategy=strategy,
            devices=1,
            callbacks=callbacks,
            logger=DummyLogger(),
            log_every_n_steps=1 << 30,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **limits,
            **settings,
        )
        self._live = live
        connector: Any = self._data_connector
        connector.prepare_data = lambda: None
        signals: Any = self._signal_connector
        signals.register_signal_handlers = signals.teardown = lambda: None

    @override
    def _teardown(self) -> None:
        """Tear nothing down: a further step may follow, and fake tensors take no memory."""

    def go_on(self) -> None:
        """Go on where the loader ended the fit, until it ends it again."""
        self.state.status = TrainerStatus.RUNNING
        self.training = True
        loop, fetcher = self.fit_loop.epoch_loop, self.fit_loop._data_fetcher
        assert fetcher is not None
        with suppress(_TunerExitException):
            while True:
                loop.advance(fetcher)
                loop.on_advance_end(fetcher)

    def adopt(self) -> None:
        """Let the module see the live Trainer's datamodule, and its hooks on batches."""
        datamodule = getattr(self._live, "datamodule", None)
        if datamodule is not None:
            self.datamodule = datamodule
            self._data_connector._datahook_selector = _DataHookSelector(self.lightning_module, datamodule)


def batches_of(live: L.Trainer | None) -> int:
    """Return the number of batches that the dry run reports for an epoch."""
    count = 0 if live is None else live.num_training_batches
    return max(int(count), _LEAST_STEPS) if 0 < count < float("inf") else _BATCHES


def averaging(live: L.Trainer | None, *, on_host: bool) -> list[Callback]:
    """Return the callbacks that average weights, which a dry run runs as well.

    Args:
        live: The Trainer of the real fit, or None.
        on_host: Whether to include callbacks that keep their average on the host.
    """
    found = [one for one in _callbacks(live) if isinstance(one, _AVERAGING)]
    return [one for one in found if on_host or getattr(one._device, "type", "") != "cpu"]


def tensors_held(live: L.Trainer | None, *, on_host: bool) -> Iterator[Tensor]:
    """Yield the tensors that all other callbacks hold now, in modules and containers too."""
    for callback in _callbacks(live):
        if isinstance(callback, _AVERAGING):
            continue
        for tensor in _tensors(vars(callback)):
            if on_host or tensor.device.type != "cpu":
                yield tensor


def _callbacks(live: L.Trainer | None) -> list[Callback]:
    return [] if live is None else list(getattr(live, "callbacks", []))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, L.LightningModule):
        return  # the module in training
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
