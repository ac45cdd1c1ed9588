"""The runs of an evaluation check, with replayed random draws."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L

from lightning_unified.errors import RankError, SplitError, UndoError
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.step.exactness.draws.constant import ConstantDraws
from lightning_unified.step.exactness.draws.replay import DrawMode, RecordDraws, ReplayDraws
from lightning_unified.step.exactness.group import CheckGroup
from lightning_unified.step.exactness.parameters.formats import has_autocast, precise
from lightning_unified.step.exactness.rows import starts_of, window
from lightning_unified.step.exactness.trials.refusals import failure_on_rows
from lightning_unified.step.exactness.trials.results import Results, aside, copied
from lightning_unified.step.results.state.writes import drawn_unequally

__all__ = ["EvaluationRuns", "EvaluationTrial"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationTrial:
    """One run of an evaluation step over whole rows, and the runs over their micro-batches.

    Args:
        batch: The whole rows.
        whole: Their results.
        is_drawn: Whether the step draws random numbers.
        repeated: Runs them once more, with the same random draws.
        redrawn: Runs them once more, with other random draws.
        sizes: The rows of each micro-batch.
        batches: The micro-batches.
        runs: The results of each micro-batch.
    """

    batch: Any
    whole: Results
    is_drawn: bool
    repeated: Callable[[], Results]
    redrawn: Callable[[], Results]
    sizes: Sequence[int]
    batches: Sequence[Any]
    runs: Sequence[Results]


class EvaluationRuns:
    """Runs an evaluation step on some rows, and undoes each run.

    Args:
        trainer: The Trainer that evaluates.
        split: `split(batch, start, stop, rows=…)` returns some rows of a batch.
        group: The processes that run the step.

    Attributes:
        has_drawn: Whether a step has drawn random numbers.
        leaves_gradients: Whether a step has left gradients of the module's parameters.
    """

    def __init__(self, trainer: L.Trainer, split: Callable[..., Any], *, group: CheckGroup) -> None:
        self._trainer, self._split, self._group = trainer, split, group
        self.has_drawn = self.leaves_gradients = self._keeps_autocast = False

    def trials(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        rows: int,
        size: int,
        unit: int,
        splits: Sequence[Sequence[int]],
    ) -> Iterator[EvaluationTrial]:
        """Run `size` rows of a batch whole, and yield a trial for each split of these rows.

        Args:
            step: Runs the stage's step on a batch.
            batch: The whole batch.
            rows: The number of rows of the batch.
            size: The number of rows to run.
            unit: The number of rows that a split keeps together.
            splits: The rows of each micro-batch, for one or more splits.

        Raises:
            SplitError: If the step fails on some rows only.
        """
        start = window(batch, rows=rows, size=size, unit=unit)
        own = self._split(batch, start, start + size, rows=rows) if size < rows else batch
        try:
            whole, recorded = self._whole(step, own, rows=size, of=rows)
        except SplitError as refusal:
            error = self._failure(step, batch)
            if error is not None and type(error) is type(refusal.__cause__):
                raise error from None  # the whole batch fails too: raise the user's error
            raise
        self.has_drawn |= recorded.has_drawn or whole.draws_on_host

        def repeated() -> Results:
            return self._whole(step, own, rows=size, of=rows)[0]

        def redrawn() -> Results:
            return self._run_rows(step, own, ConstantDraws(), rows=size, of=rows)

        for sizes in splits:
            places = list(zip(starts_of(sizes), sizes, strict=True))
            batches = [self._split(batch, start + first, start + first + one, rows=rows) for first, one in places]
            runs = []
            for micro_batch, (first, one) in zip(batches, places, strict=True):
                replay = ReplayDraws(recorded.draws, rows=size, start=first, stop=first + one, order="interleaved")
                runs.append(self._run_rows(step, micro_batch, replay, rows=one, of=size))
            self.has_drawn |= bool(drawn_unequally(whole.written, [run.written for run in runs]))
            yield EvaluationTrial(
                batch=own,
                whole=whole,
                is_drawn=self.has_drawn,
                repeated=repeated,
                redrawn=redrawn,
                sizes=sizes,
                batches=batches,
                runs=runs,
            )

    def _whole(self, step: Callable[[Any], Any], batch: Any, *, rows: int, of: int) -> tuple[Results, RecordDraws]:
        """Run the step on `rows` of `of` rows; return the results and the draws.

        A step that fails without autocast runs with it.
        """
        recorded = RecordDraws()
        if not has_autocast(self._trainer) or self._keeps_autocast:
            return self._run_rows(step, batch, recorded, rows=rows, of=of), recorded
        try:
            return self._run(step, batch, recorded), recorded
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, (UndoError, RankError)):
                raise
            self._keeps_autocast = True
        return self._whole(step, batch, rows=rows, of=of)

    def _run_rows(self, step: Callable[[Any], Any], batch: Any, draws: DrawMode, *, rows: int, of: int) -> Results:
        """Run the step on `rows` of `of` rows.

        If `rows` is smaller than `of`, an error of the step is raised as a `SplitError`.
        """
        try:
            return self._run(step, batch, draws)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, (UndoError, RankError)) or rows == of:
                raise
            stage = self._trainer.state.stage
            phase = "validation" if stage is None or stage.dataloader_prefix == "val" else stage.value
            name = f"{type(self._trainer.lightning_module).__name__}.{phase}_step"
            raise SplitError(
                f"{failure_on_rows(name, f'{rows} of {of}', error)} Use a smaller batch; or give MicroBatchRules(unit=n) if n rows "
                "belong together.",
                is_of_rows=True,
            ) from error

    def _failure(self, step: Callable[[Any], Any], batch: Any) -> BaseException | None:
        """Return the error of the step on the whole batch; None without one.

        None also if memory runs out.
        """
        try:
            self._run(step, batch, RecordDraws())
        except RankError:
            raise
        except Exception as error:
            return None if is_out_of_memory(error) else error
        return None

    def _run(self, step: Callable[[Any], Any], batch: Any, draws: DrawMode) -> Results:
        own = copied(batch)
        with aside(self._trainer, self._trainer._results, draws) as block:
            with self._group.passes(), draws, precise(self._trainer, keeps_autocast=self._keeps_autocast):
                returned = step(own)
            parameters = self._trainer.lightning_module.parameters()
            self.leaves_gradients |= any(one.grad is not None for one in parameters)
            return block.gather(returned)
