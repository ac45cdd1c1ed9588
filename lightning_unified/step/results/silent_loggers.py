"""Silence loggers while a step runs that will be undone."""

from types import TracebackType
from typing import Any, Self

import lightning as L
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import Logger

__all__ = ["STAND_INS", "SilentLoggers", "say_direct_logs"]

STAND_INS = "trainer._loggers"  # the path at which a watch over the Trainer's state sees the stand-ins

_WRITING = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize")


class SilentLoggers:
    """A block in which the loggers of a Trainer write nothing.

    The stand-in of a logger is of the logger's class and has its attributes, so that a step finds everything else unchanged.

    Attributes:
        is_asked: Whether a step tried to write to a logger.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer, self._loggers = trainer, trainer.loggers
        self.is_asked = False

    def __enter__(self) -> Self:
        self._trainer.loggers = [self._silent(logger) for logger in self._loggers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._trainer.loggers = self._loggers

    def _silent(self, logger: Logger) -> Logger:
        def write(*_args: Any, **_kwargs: Any) -> None:
            self.is_asked = True

        def experiment(_logger: Logger) -> _DummyExperiment:
            self.is_asked = True
            return _DummyExperiment()

        methods = {**dict.fromkeys(_WRITING, write), "experiment": property(experiment)}
        silent = object.__new__(type(type(logger).__name__, (type(logger),), methods))
        object.__setattr__(silent, "__dict__", vars(logger))
        return silent


def say_direct_logs(trainer: L.Trainer) -> None:
    """Warn once that the step writes to a logger directly, not by `self.log`.

    Only strategies that split batches warn.
    """
    policy = getattr(trainer.strategy, "policy", None)
    if policy is not None:
        policy.notices.say_per_micro_batch(
            "the step itself writes to the logger (self.logger): it does so",
            "Use self.log, which logs the whole batch's value, or write in a hook such as on_train_batch_end.",
        )
