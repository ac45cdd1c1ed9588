"""What one run does about memory: how its batches are cut, and what follows when memory runs out or is about to."""

import logging
from collections.abc import Iterable
from typing import Literal

import lightning as L
from torch.optim import Optimizer

from lightning_unified.errors import BudgetError, ConfigurationError, OutOfMemoryError, SplitError
from lightning_unified.planning import describe_bytes, describe_shortage, static_bytes
from lightning_unified.training.budget_watch import BudgetWatch
from lightning_unified.training.oom import release_cached_memory
from lightning_unified.training.sizes import MicroBatchSize
from lightning_unified.training.splittability import Verdict, refuse_batch_norm
from lightning_unified.units import format_bytes

__all__ = ["MemoryPolicy"]

log = logging.getLogger("lightning_unified")


class MemoryPolicy:
    """Decides for a strategy, on what the step, the callbacks and the budget tell it.

    Args:
        watch: The budget and what is used of it.
        micro_batch_size: The largest number of rows run at once, or `"auto"`.
        recover: Whether a step is repeated after an out-of-memory error.
        optimizer_rollback: Whether weights and optimizer state are copied around each optimizer step.
        batch_norm: Whether a module with BatchNorm in train mode may be cut: `"refuse"` or `"micro"`.
        check_split: Whether gradients are compared before the first cut.

    Attributes:
        sizes: The micro-batch size in use.
        effective_batch_size: Rows of the largest batch so far.
        recoveries: How many steps were repeated.
        events: What was decided on the way, for people.

    Raises:
        ConfigurationError: If an argument is not one of those named.
    """

    def __init__(
        self,
        watch: BudgetWatch,
        *,
        micro_batch_size: int | Literal["auto"],
        recover: bool,
        optimizer_rollback: bool,
        batch_norm: Literal["refuse", "micro"],
        check_split: bool,
    ) -> None:
        if batch_norm not in ("refuse", "micro"):
            raise ConfigurationError(f'batch_norm={batch_norm!r}: give "refuse" or "micro".')
        self.watch = watch
        self.sizes = MicroBatchSize(micro_batch_size)
        self.recover = recover
        self.optimizer_rollback = optimizer_rollback
        self.check_split = check_split
        self.effective_batch_size: int | None = None
        self.recoveries = 0
        self.events: list[str] = []
        self._asked_size = micro_batch_size
        self._batch_norm = batch_norm
        self._recovered = ""
        self._module: L.LightningModule | None = None
        self._optimizers: list[Optimizer] = []
        self._forget()

    def _forget(self) -> None:
        self._verdict: Verdict | None = None
        self._refusal: SplitError | None = None
        self._before_watch: tuple[int | None] | None = None

    def refuse_if_too_small(self, module: L.LightningModule, optimizers: Iterable[Optimizer]) -> None:
        """Raise `BudgetError` if the budget cannot even hold what `module` needs before any activation."""
        need = static_bytes(module, optimizers)
        budget = self.watch.budget
        if budget is not None and sum(need.values()) > budget.bytes:
            raise BudgetError(
                f"a budget of {format_bytes(budget.bytes)} ({budget.spec}) cannot hold {type(module).__name__}: {describe_bytes(need)}, "
                f"before any activation. Give a budget well above {format_bytes(sum(need.values()))}, or train a smaller model."
            )

    def begin(self, module: L.LightningModule, optimizers: list[Optimizer]) -> None:
        """Begin a fit: what was found out about another module is forgotten."""
        self._module, self._optimizers = module, optimizers
        self.effective_batch_size = None
        self._forget()
        self.watch.begin()
        self.sizes.keep_together(getattr(module, "micro_batch_unit", 1), whose=type(module).__name__)

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of an effective batch that go through forward and backward at once; None before the first batch is done."""
        return None if self.effective_batch_size is None else self.sizes.at_once(self.effective_batch_size)

    @property
    def size_reason(self) -> str:
        """Why the micro-batch is as large as it is."""
        reason = "as asked" if self._asked_size != "auto" else "the whole batch"
        return f"{reason}, then smaller: {self._recovered}" if self.recoveries else reason

    @property
    def weighting_reason(self) -> str:
        """By what micro-batches are weighted, and how that is known."""
        if self._verdict is not None:
            return self._verdict.reason
        return "no batch has been cut" if self.check_split else "as declared, else rows; unchecked (check_split=False)"

    def allow_split(self, rows: int) -> None:
        """Raise `SplitError` if the module says, or shows, that its batch of `rows` cannot be cut exactly."""
        module = self._module
        assert module is not None
        if self._refusal is not None:
            raise self._refusal
        if getattr(module, "splittable", True) is False:
            raise SplitError(
                f"{type(module).__name__}.splittable is False and its batch of {rows} rows must run in parts of {self.sizes.limit}; "
                "raise the budget or the micro-batch size, or use a smaller batch."
            )
        if self._batch_norm == "refuse":
            refuse_batch_norm(module, rows=rows)

    def split_checked(self, verdict: Verdict) -> None:
        """Note by what micro-batches are weighted; say so where the module did not, or where it could not be checked."""
        if verdict is self._verdict:
            return
        if not verdict.conclusive and (self._verdict is None or self._verdict.conclusive):
            log.warning("Micro-batches are weighted by %s.", verdict.reason)
        if not verdict.conclusive or verdict.count is not None:
            self.events.append(f"micro-batches weighted by {verdict.reason}")
        self._verdict = verdict

    def runs_whole(self, refusal: SplitError) -> bool:
        """Return whether a batch that may not be cut runs whole: if only the watch over the budget wanted it smaller."""
        if self._before_watch is None:
            return False
        (self.sizes.limit,), self._refusal, self._before_watch = self._before_watch, refusal, None
        self.events.append("its batches cannot be cut exactly, so it goes on with them whole")
        log.warning("%s %s", refusal, self.events[-1])
        return True

    def out_of_memory(self, *, phase: str, reason: str, rows: int | None, attempt: int) -> None:
        """Free memory and choose a smaller size for the batch that failed.

        Raises:
            OutOfMemoryError: If the smallest unit of rows has failed already.
        """
        release_cached_memory(self.watch.device)
        failed = None if rows is None else self.sizes.at_once(rows)
        shrunk = failed is not None and self.sizes.shrink(failed)
        if not shrunk and (phase != "optimizer step" or attempt > 1):
            assert self._module is not None
            need = static_bytes(self._module, self._optimizers)
            raise OutOfMemoryError(
                describe_shortage(need, budget_bytes=self.watch.bytes, phase=phase, reason=reason, rows=failed)
            )
        self.recoveries += 1
        what_next = f"with {self.sizes.limit} at once" if shrunk else "after clearing caches"
        self._recovered = f"out of memory in {phase} with {failed} rows at once; repeated {what_next}"
        self._before_watch = None
        self.events.append(self._recovered)
        log.warning(
            "Memory ran out in %s with %s rows at once (%s). The step is repeated %s.", phase, failed, reason, what_next
        )

    def batch_done(self, rows: int | None) -> None:
        """Note the batch, and whether the process has outgrown the budget."""
        if rows is not None:
            self.effective_batch_size = max(rows, self.effective_batch_size or 0)
        overrun = self.watch.overrun() if self.effective_batch_size is not None else None
        if overrun is not None and self.shrink(overrun):
            self.watch.count_anew()

    def shrink(self, reason: str) -> bool:
        """Halve the micro-batch from the next batch on, before memory runs out.

        Args:
            reason: Why, for people.

        Returns:
            Whether it could be done: not before the first batch, below the smallest unit, or where a batch cannot be cut exactly.
        """
        size, shrunk = self.micro_batch_size, False
        try:
            if size is None:
                what_next = "no batch that can be cut has run yet"
            else:
                self.allow_split(size)
                before, shrunk = self.sizes.limit, self.sizes.shrink(size)
                if self._verdict is None and shrunk and self._before_watch is None:
                    self._before_watch = (before,)
                what_next = (
                    f"micro-batches of {self.sizes.limit} rows from here on" if shrunk else "nothing left to shrink"
                )
        except SplitError:  # memory has not run out: a batch that cannot be cut exactly goes on whole
            what_next = "its batches cannot be cut exactly, so it goes on with them whole"
        self.events.append(f"{reason}; {what_next}")
        log.warning("%s", self.events[-1])
        return shrunk
