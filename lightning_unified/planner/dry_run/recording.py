"""Start and end of a dry run's recording, between two batches.

It starts once a step has written weights.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_unified.cost_model.trace.trace import Event
from lightning_unified.nn.module_tree.walks import tensors_of
from lightning_unified.planner.dry_run.counters import Counters
from lightning_unified.planner.dry_run.histories import fill_histories
from lightning_unified.planner.dry_run.strategy import DryRunStrategy
from lightning_unified.planner.fake.known_values import Answers
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.planner.fake.storages import Lives, alike
from lightning_unified.planner.repeats import Replay, UnlikeError
from lightning_unified.step.results.metrics import metrics_of

__all__ = ["RecordingCallback"]

_LIMIT = 16  # batches without an optimizer step; after that, one batch counts as a step


class RecordingCallback(Callback):
    """Supplies the batches of a dry run, and records one step that follows another.

    Args:
        answers: Notes the reads of the recorded step.
        strategy: Counts optimizer steps.
        make_batch: Makes a validation batch if its argument is true, else a training batch.
        validates: Whether to record a validation step instead of a training step.
        batches: The number of batches that the loader reports for an epoch.

    Attributes:
        events: The recorded events; None before the recording ends.
        wrote: Whether the recorded step wrote weights.
        held: Fake copies of the tensors that other callbacks hold.
        averages: Fake copies of the callbacks that average weights.
        counters: The counters that are restored before a further step.
        is_unlike: Whether blocks that were skipped must be traced.
        replay: Skips repeated blocks; None traces all.
        is_steady: Whether the same storages live after the recorded step as before it.
    """

    def __init__(
        self,
        recorder: Recorder,
        answers: Answers,
        strategy: DryRunStrategy,
        *,
        make_batch: Callable[[bool], Any],
        validates: bool,
        batches: int,
    ) -> None:
        self._recorder, self._answers, self._strategy = recorder, answers, strategy
        self._make_batch, self._validates, self._batches = make_batch, validates, batches
        self._module: L.LightningModule | None = None
        self._records = False
        self._steps = self._seen = 0
        self.events: tuple[Event, ...] | None = None
        self.wrote = False
        self.held: list[Tensor] = []
        self.averages: list[Callback] = []
        self.counters: Counters | None = None
        self.is_steady = self.is_unlike = False
        self.replay: Replay | None = None
        self._lives: list[Lives] = []
        self._metrics: list[Metric] = []
        self._has_metrics = True  # until a training step of this copy has shown that it has none
        self._goes_on = False
        answers.silent = True

    def go_on(self) -> None:
        """Record one more step, with all counters as in the first recorded step."""
        assert self.counters is not None
        self.counters.restore()
        self._goes_on, self._records = True, False
        self._seen = 0
        self.events, self.wrote = None, False

    def loader(self, *, validation: bool = False) -> "_Loader":
        """Return the loader for the Trainer."""
        return _Loader(self, validation=validation, count=self._batches)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._module = pl_module
        connector: Any = trainer._logger_connector
        connector.on_batch_end = partial(self._silently, connector.on_batch_end)

    def _silently(self, call: Callable[[], None]) -> None:
        """Run a call that reads values only to display them, without noting its reads."""
        was, self._answers.silent = self._answers.silent, True
        call()
        self._answers.silent = was

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._recorder.phase = "callbacks"

    def next_batch(self, *, validation: bool) -> Any:
        """Return the next batch; begin or end the recording before it.

        It ends if a step is complete, and begins if one follows.
        """
        if self._records:
            self._look()
        self._seen += 1
        records = validation == self._validates
        if records and (self._strategy.steps or self._validates or self._seen > _LIMIT):
            self._begin()
        self._recorder.phase = "batch"
        batch = self._make_batch(validation)
        if validation:
            self._recorder.phase = "validation"
        return batch

    def _begin(self) -> None:
        self._records, self._steps = True, self._strategy.steps
        if not self._goes_on and not self._validates:
            fill_histories(self._strategy.optimizers)
        self._mark(again=not self._goes_on)
        if not self._goes_on and not self._validates:
            self._has_metrics = bool(self._metrics)
        self._metrics = []  # a step may replace them, and their storages end then
        self._answers.silent = False
        self._answers.reads.clear()
        assert self.counters is not None
        self.counters.keep()  # each time: memory options are plain attributes too, and differ between steps
        if not self._goes_on:
            self._lives = self._recorder.lives
        if self.replay is not None:
            self.replay.begin()
        self._recorder.begin(order=self._lives)

    def _look(self) -> None:
        self.wrote = self._strategy.steps > self._steps
        if self.wrote or self._validates or self._seen > _LIMIT:
            self._mark(again=self._has_metrics)
            self._has_metrics = bool(self._metrics)
            try:
                self.events = self._recorder.stop(None if self.replay is None else self.replay.expanded)
            except UnlikeError:
                self.events, self.is_unlike = (), True
            self.is_steady = alike(self._recorder.lives, self._lives)
            raise _TunerExitException

    def _mark(self, *, again: bool = True) -> None:
        """Mark the categories of all storages that are known now.

        Args:
            again: Whether to look for torchmetrics objects again. Nothing of the module runs between two steps, so those that were found
                after one step are those before the next. If the first training step leaves none, further steps, which run the same code,
                leave none either.
        """
        module = self._module
        assert module is not None
        self._metrics = metrics_of(module) if again else self._metrics
        self._recorder.mark(_states_of(self._metrics), "buffers")
        parameters, buffers = tensors_of(module)
        self._recorder.mark(buffers, "buffers")
        self._recorder.mark(parameters, "weights")
        self._strategy.mark_state(parameters)
        kept = [vars(callback).get("_average_model") for callback in self.averages]
        modules = [average for average in kept if isinstance(average, nn.Module)]
        averages = [one for average in modules for one in (*average.parameters(), *average.buffers())]
        self._recorder.mark([*averages, *self.held], "callbacks")


class _Loader:
    """An endless loader.

    Its epoch outlasts the dry run, and it continues after it has ended a fit.
    """

    def __init__(self, recording: RecordingCallback, *, validation: bool, count: int) -> None:
        self._recording, self._validation, self._count = recording, validation, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._recording.next_batch(validation=self._validation)


def _states_of(metrics: Iterable[Metric]) -> Iterator[Tensor]:
    """Yield the states of torchmetrics objects and their defaults.

    They move with the module although they are no buffers.
    """
    for metric in metrics:
        for name, default in metric._defaults.items():
            state = getattr(metric, name)
            yield from [state] if isinstance(state, Tensor) else state
            yield from [default] if isinstance(default, Tensor) else default
