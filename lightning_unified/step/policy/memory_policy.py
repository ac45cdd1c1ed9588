"""The memory policy of a run: an object for each decision, and out-of-memory reactions."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import lightning as L
from torch.optim import Optimizer

from lightning_unified.cost_model import describe_shortage
from lightning_unified.errors import OutOfMemoryError, RecomputationError
from lightning_unified.options import ActivationCheckpointing, AppliedOptions, Compilation, MemoryOptions
from lightning_unified.step.policy.batch_rules import BatchRules
from lightning_unified.step.policy.notices import Notices
from lightning_unified.step.policy.sizing import MicroBatchSizing
from lightning_unified.step.policy.split_approval import SplitApproval
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.recovery.cache_care import CacheCare
from lightning_unified.step.recovery.kept import KeptMemory
from lightning_unified.step.recovery.oom import caught, requested_bytes
from lightning_unified.step.recovery.sizes import MicroBatchSize
from lightning_unified.step.recovery.small_budgets import refuse_budget_below_process, refuse_small_budget
from lightning_unified.step.split import BatchShape, positions
from lightning_unified.units import format_rows

__all__ = ["STAGES", "MemoryPolicy"]

log = logging.getLogger("lightning_unified")

T = TypeVar("T")

STAGES = {"validation": "validate", "test": "test", "predict": "predict"}  # of each phase of an evaluation


class MemoryPolicy:
    """Reacts when memory runs out in a step; its objects make all other decisions about memory.

    Attributes:
        batches: The rules and splitters of the batches.
        splits: Whether a batch may be split, and by which weights.
        sizing: The micro-batch sizes, and how they shrink and grow.
        caches: Clears the device's caches between batches.
        kept: Memory that the module keeps between steps.
        compilation: Which parts of the module are compiled.
        recomputation: Which activations are recomputed. `"auto"` recomputes all once no smaller size is left.
        applied_options: The optimizer kernel, the rows of a chunked loss, and the attention.
        recoveries: How many steps were repeated.
        most_chunks: The largest number of chunks of an encoder's call that a dry run executes; None for all of them.
        events: The memory events of the run, as sentences.
        notices: Writes texts to the log and the events once.
    """

    def __init__(self, options: MemoryOptions, watch: BudgetWatch) -> None:
        self.options, self.watch = options, watch
        self.events: list[str] = []
        self.notices = Notices(self.events)
        self.batches = BatchRules(options.micro_batches, check_split=options.check_split)
        self.splits = SplitApproval(
            self.batches, notices=self.notices, watch=watch, batch_norm=options.batch_norm, events=self.events
        )
        self.caches = _caches_of(watch)
        self.kept = KeptMemory()
        self.compilation = Compilation(options.compile)
        self.recomputation = ActivationCheckpointing(options.recompute)
        self.applied_options = AppliedOptions(
            optimizer_kernel=options.optimizer_kernel, loss_chunk=options.loss_chunk, attention=options.attention
        )
        self.sizing = MicroBatchSizing(
            options,
            watch=watch,
            kept=self.kept,
            splits=self.splits,
            checkpointing=self.recomputation,
            events=self.events,
        )
        self.recoveries = 0
        self.most_chunks: int | None = None
        self._module: L.LightningModule | None = None
        self._optimizers: list[Optimizer] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process: options and events, without the objects of one fit."""
        # `batches` holds the rules, and leaves them behind where they cannot be pickled
        options = replace(self.options, micro_batches=None)
        return {**vars(self), "options": options, "_module": None, "_optimizers": [], "caches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, with new caches."""
        vars(self).update(state, caches=_caches_of(state["watch"]))

    @property
    def sizes(self) -> MicroBatchSize:
        """The micro-batch size in training."""
        return self.sizing.training

    @property
    def evaluation_sizes(self) -> MicroBatchSize:
        """The micro-batch size in validation, test and predict."""
        return self.sizing.evaluation

    def check_budget(self, module: L.LightningModule, optimizers: Iterable[Optimizer]) -> None:
        """Raise `BudgetError` if the budget cannot hold `module`, gradients and optimizer state."""
        self._module, self._optimizers = module, list(optimizers)
        refuse_small_budget(self.watch, module, self._optimizers)
        if self._optimizers:  # a fit: an evaluation of a large process is not refused
            refuse_budget_below_process(self.watch, module, self._optimizers)

    def begin(self, module: L.LightningModule, optimizers: list[Optimizer], *, precision: str) -> None:
        """Begin a fit or an evaluation; findings about another module are dropped."""
        self._module, self._optimizers = module, optimizers
        self.notices.begin()
        self.batches.begin(module)
        self.splits.begin(module)
        self.watch.begin()
        self.caches.begin(self.watch.device)
        self.kept.begin(module)
        self.sizing.begin(module, unit=self.batches.of("fit").unit, precision=precision)

    def retried(self, call: Callable[[], T], *, phase: str, begin: Callable[[], Callable[[], Any]] | None = None) -> T:
        """Return the result of `call`; call it again after an out-of-memory error.

        Args:
            call: The function to run.
            phase: Its name in events and errors: `"batch"`, `"prepare"` or `"weights"`.
            begin: Records the state before an attempt, and returns the function that restores it; None for a call that
                changes nothing.
        """
        if not self.options.recover:
            return call()
        attempt = 0
        while True:
            undo = None if begin is None else begin()
            result, reason = caught(call)
            if reason is None:
                return result  # pyright: ignore[reportReturnType]
            attempt += 1
            if undo is not None:
                undo()
            del undo
            self.out_of_memory(phase=phase, reason=reason, shape=None, attempt=attempt)

    def out_of_memory(
        self, *, phase: str, reason: str, shape: BatchShape | None, attempt: int, batch: Any = None
    ) -> None:
        """Free memory and choose a smaller size for the batch that failed.

        Args:
            phase: The phase in which memory ran out: `"forward"`, `"backward"`, `"optimizer step"`, `"prepare"`,
                `"validation"`, ….
            reason: The text of the allocator's error.
            shape: The batch's shape; None for a batch that cannot be split.
            attempt: The number of failures of this batch, from 1 on.
            batch: The batch, for the error message.

        Raises:
            OutOfMemoryError: If nothing smaller is left to try and the batch has failed with cleared caches too.
        """
        self.kept.give_back(for_good=phase != "prepare")  # memory to keep is made there
        self.watch.release()
        reason = self.watch.named(reason)
        sizes = self.evaluation_sizes if phase in STAGES else self.sizes
        failed = None if shape is None else sizes.micro_batch_size(shape)
        shrunk, recomputes = self._react(sizes, phase=phase, shape=shape, attempt=attempt)
        if not shrunk and not recomputes and attempt > 1:
            lengths = set() if shape is None else positions(batch, shape.rows)
            raise OutOfMemoryError(self._shortage(phase, reason, failed, lengths))
        self.recoveries += 1
        what_next = "after clearing caches"
        if shrunk and shape is not None:
            what_next = f"with micro-batches of {format_rows(sizes.micro_batch_size(shape))}"
        if recomputes:
            what_next = f"with activations recomputed ({self.recomputation.reason})"
        size = "the whole batch" if failed is None else f"a micro-batch of {format_rows(failed)}"
        event = f"out of memory in {phase} with {size}; repeated {what_next}"
        if shrunk and phase not in STAGES:
            self.sizing.changed_by = f"smaller: {event}"
        self.sizing.before_overrun = None
        self.events.append(event)
        log.warning("Memory ran out in %s with %s (%s). It is repeated %s.", phase, size, reason, what_next)
        self.sizing.save()

    def _react(self, sizes: MicroBatchSize, *, phase: str, shape: BatchShape | None, attempt: int) -> tuple[bool, bool]:
        """Shrink the size or recompute activations; return whether each of them was done."""
        trains, why = phase in ("forward", "backward"), "because memory ran out"
        can_split = phase not in STAGES or self.batches.of(STAGES[phase]).splittable
        if self.splits.verdict is None and trains and self.sizing.before_failure is None:
            self.sizing.before_failure = sizes.state_dict()
        if trains and shape is not None and self.splits.refuses(shape.rows) and self.sizing.recompute_everything(why):
            return False, True
        if shape is not None and can_split and sizes.failed(shape, room_bytes=self.watch.room()):
            return True, False
        return False, trains and attempt > 1 and self.sizing.recompute_everything(why)

    def _shortage(self, phase: str, reason: str, rows: int | None, lengths: set[int]) -> str:
        assert self._module is not None
        return describe_shortage(
            self._module,
            self._optimizers,
            budget_bytes=self.watch.bytes,
            phase=phase,
            reason=reason,
            rows=rows,
            requested=requested_bytes(reason),
            positions=lengths,
            recomputes=bool(self.recomputation.on),
        )

    def leave_unrecomputed(self, error: RecomputationError) -> None:
        """Keep the activations of the blocks whose two runs differ, so that the step can be repeated.

        Raises:
            RecomputationError: The error itself, if the user asked for activation checkpointing.
        """
        if not self.recomputation.leave_out(error.kind):
            raise error
        name = getattr(error.kind, "__qualname__", str(error.kind))
        self.events.append(f"{name} is not recomputed from here on, and the step repeated: {error}")
        log.warning(
            "%s Activation checkpointing was turned on automatically: it leaves out all %s from here on, and the step is repeated.",
            error,
            name,
        )

    def batch_done(self, shape: BatchShape | None) -> None:
        """Record a batch that ran, and adapt caches, budget and size.

        Caches are cleared if needed, and a `leave` budget is resolved again. If the batch's peak is above the budget,
        the micro-batch size shrinks.
        """
        if not self.kept.may_be_recorded:
            self.events.extend(self.caches.batch_done(self.watch.bytes))
        if (followed := self.watch.follow()) is not None:
            self.events.append(followed)
            log.info("%s", followed)
        if shape is not None:
            self.sizing.batch_done(shape)
        overrun = self.watch.overrun() if self.sizing.largest is not None else None
        if overrun is not None and self.sizing.shrink(overrun, has_failed=True):
            self.watch.count_anew()


def _caches_of(watch: BudgetWatch) -> CacheCare:
    """Return the cache care of the watch's device.

    A simulated device's counters are read through the watch.
    """
    if watch.machine is None:
        return CacheCare()
    return CacheCare(
        read=lambda _: watch.reading(),
        live=lambda _: watch.reading().allocated.bytes,
        release=lambda _: watch.release(),
    )
