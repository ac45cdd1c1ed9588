"""Metrics of the progress bar that wait for the device only when they are read.

`self.log(..., prog_bar=True)` makes Lightning copy the value to the host after every batch, whether a bar is drawn or not. The copy waits
until the device has finished the step. Then the device waits for the host to launch the next step.
"""

from typing import Any

import lightning as L
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor
from typing_extensions import override

__all__ = ["defer_progress_metrics"]

_result: Any = result  # the name below is not in the module's interface


def defer_progress_metrics(trainer: L.Trainer) -> None:
    """Keep the progress bar's metrics on the device until they are read.

    `trainer.progress_bar_metrics` reads them.
    """
    connector = trainer._logger_connector
    if type(connector) is _LoggerConnector:  # another class may do something else at the end of a batch
        connector.__class__ = _Deferring


class _Deferring(_LoggerConnector):
    """Lightning's logger connector (2.6.6), with one deviation.

    `on_batch_end` does not copy metrics of the progress bar to the host.
    """

    @override
    def on_batch_end(self) -> None:
        convert = _result.convert_tensors_to_scalars
        _result.convert_tensors_to_scalars = _unchanged
        try:
            super().on_batch_end()
        finally:
            _result.convert_tensors_to_scalars = convert

    @property
    @override
    def progress_bar_metrics(self) -> Any:
        metrics = super().progress_bar_metrics
        for name, value in metrics.items():
            if isinstance(value, Tensor):  # of an earlier loop: the metrics of this one are numbers here
                metrics[name] = value.item()
        return metrics


def _unchanged(value: Any) -> Any:
    return value
