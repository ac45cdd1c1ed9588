"""The micro-batch sizes of a run: how they shrink, grow, and are saved for the next run."""

import logging
from typing import Any

import lightning as L
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_unified.errors import SplitError
from lightning_unified.nn.module_tree.walks import modules_of
from lightning_unified.options import ActivationCheckpointing, MemoryOptions
from lightning_unified.step.policy.split_approval import SplitApproval
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.recovery.kept import KeptMemory
from lightning_unified.step.recovery.sizes import MicroBatchSize
from lightning_unified.step.recovery.sizes_file import SizesFile, fingerprint
from lightning_unified.step.split import BatchShape
from lightning_unified.units import format_rows

__all__ = ["MicroBatchSizing"]

log = logging.getLogger("lightning_unified")

_UNSPLITTABLE = "its batches cannot be split exactly, so it goes on with them whole"


class MicroBatchSizing:
    """Holds the sizes in use in training and evaluation, and changes them between batches.

    Memory that the module keeps between steps is freed before a size shrinks.

    Attributes:
        training: The micro-batch size in training.
        evaluation: The micro-batch size in validation, test and predict.
        largest: The shape of the largest batch so far; None before the first batch is done.
        is_planned: Whether a plan has set the size in training; `Plan.reasons["prediction"]` then has its reason.
        changed_by: Why the size changed last; empty if it has not.
        before_overrun: Sizes to return to if batches turn out not to split exactly, after the budget's watch made them smaller.
        before_failure: Sizes to return to in that case, after memory ran out.
        writes_file: Whether this process saves the sizes. Of several ranks, only the first one does.
    """

    def __init__(
        self,
        options: MemoryOptions,
        *,
        watch: BudgetWatch,
        kept: KeptMemory,
        splits: SplitApproval,
        checkpointing: ActivationCheckpointing,
        events: list[str],
    ) -> None:
        self.training = MicroBatchSize(options.micro_batch_size)
        self.evaluation = MicroBatchSize(options.evaluation_micro_batch_size)
        self.writes_file = True
        self._watch, self._kept, self._splits = watch, kept, splits
        self._checkpointing, self._events = checkpointing, events
        self._file = SizesFile(options.remember)
        self._fingerprint: dict[str, Any] = {}
        self.changed_by = ""
        self._forget()

    def _forget(self) -> None:
        self.is_planned = False
        self.largest: BatchShape | None = None
        self.before_overrun: dict[str, Any] | None = None
        self.before_failure: dict[str, Any] | None = None

    def begin(self, module: L.LightningModule, *, unit: int, precision: str) -> None:
        """Begin a fit or an evaluation of `module`, with sizes saved by an earlier run, if any.

        Units of `unit` rows stay together. Saved sizes hold for one precision, given by Lightning's name.
        """
        self._forget()
        name = type(module).__name__
        least = 2 if any(isinstance(child, _BatchNorm) for child in modules_of(module)) else 1
        self.training.keep_together(unit, least=least, whose=name)
        self.evaluation.keep_together(unit, whose=name)
        self._fingerprint = fingerprint(module, self._watch, precision=precision, recompute=self._checkpointing.on)
        self.load(self._file.read(self._fingerprint))

    @property
    def effective_batch_size(self) -> int | None:
        """Rows of the largest batch so far; None before the first batch is done."""
        return None if self.largest is None else self.largest.rows

    @property
    def micro_batch_size(self) -> int | None:
        """The micro-batch size of the largest batch so far; None before the first batch is done."""
        return None if self.largest is None else self.training.micro_batch_size(self.largest)

    @property
    def reason(self) -> str:
        """Why the micro-batch size has its value, for `Plan.reasons`."""
        asked = "the whole batch" if self.training.asked is None else "as asked"
        reason = "as planned, see the reason of the prediction" if self.is_planned else asked
        return f"{reason}, then {self.changed_by}" if self.changed_by else reason

    def batch_done(self, shape: BatchShape) -> None:
        """Record that a batch ran, and grow the size if there is more memory than when it failed."""
        asked = self.training.asked
        if self.largest is None and asked is not None and asked > shape.rows:
            self._events.append(
                f"micro_batch_size={asked} exceeds the batch of {format_rows(shape.rows)}, so it runs whole"
            )
            log.warning("%s. Give fewer rows to split it.", self._events[-1])
        if self.largest is None or shape.rows >= self.largest.rows:
            self.largest = shape
        self.training.worked(shape)
        if self.training.evidence.is_due and self.training.evidence.forgive(self._watch.room()):
            self._report_growth("more memory is available than when it ran out")

    def shrink(self, reason: str, *, has_failed: bool = False) -> bool:
        """Halve the micro-batch from the next batch on.

        Args:
            reason: Why, for the events.
            has_failed: Whether the size in use is known not to fit. Otherwise it shrinks for as long as pressure lasts.

        Returns:
            Whether it could be done: not before the first batch, below the smallest unit, or where a batch does not split exactly.
        """
        self._kept.give_back(for_good=True)
        shape, shrunk = self.largest, False
        try:
            if shape is None:
                outcome = "no batch that can be split has run yet"
            else:
                shrunk = self._halve(shape, has_failed=has_failed)
                rows = self.training.micro_batch_size(shape)
                outcome = f"micro-batches of {format_rows(rows)} from here on" if shrunk else "nothing left to shrink"
        except SplitError:  # memory has not run out: a batch that does not split exactly stays whole
            outcome = _UNSPLITTABLE
        if shrunk:
            self.changed_by = f"smaller: {reason}"
        self._events.append(f"{reason}; {outcome}")
        log.warning("%s", self._events[-1])
        self.save()
        return shrunk

    def _halve(self, shape: BatchShape, *, has_failed: bool) -> bool:
        sizes = self.training
        rows = sizes.micro_batch_size(shape)
        self._splits.require(shape.rows, micro_batch_size=rows)
        if rows <= sizes.smallest(shape):
            return False
        before = sizes.state_dict()
        shrunk = sizes.failed(shape, room_bytes=self._watch.bytes) if has_failed else sizes.press(shape)
        if shrunk and self._splits.verdict is None and self.before_overrun is None:
            self.before_overrun = before
        return shrunk

    def grow(self, reason: str) -> bool:
        """Undo one halving by `shrink`; return whether there was one.

        A size that ran out of memory stays refused.
        """
        grown = self.largest is not None and self.training.relax(self.largest)
        if grown:
            self._report_growth(reason)
        return grown

    def _report_growth(self, reason: str) -> None:
        assert self.largest is not None
        rows = format_rows(self.training.micro_batch_size(self.largest))
        self.changed_by = f"larger again: {reason}; micro-batches of {rows}"
        self._events.append(f"{reason}; micro-batches of {rows} from here on")
        log.info("%s", self._events[-1])

    def recompute_everything(self, why: str) -> bool:
        """Recompute all activations from here on; return whether this changed anything.

        It changes nothing if the user decided on recomputation, or if all are recomputed already. Otherwise the search
        for sizes starts over, because a step needs less memory.
        """
        done = self._checkpointing.more(why)
        if done:
            self.training.evidence.start_over()
        return done

    def goes_whole(self, refusal: SplitError) -> bool:
        """Return whether a batch that does not split exactly runs whole; restore the sizes if so.

        It runs whole if only the budget's watch made its micro-batches smaller. It also does if recomputing activations
        makes it need less memory. A run that has split batches already stops, because some of them may have been
        inexact.
        """
        if self._splits.verdict is not None or refusal.is_final:
            return False
        if self.before_failure is not None and self.recompute_everything("because memory ran out"):
            self.training.load_state_dict(self.before_failure)
            self.before_failure = None
            log.warning("%s It goes on with its batches whole.", refusal)
        elif self.before_overrun is not None:
            self.training.load_state_dict(self.before_overrun)
            self.before_overrun = None
            self._events.append(_UNSPLITTABLE)
            log.warning("%s %s", refusal, self._events[-1])
        else:
            return False
        self._splits.refusal, self.changed_by = refusal, ""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes and the fingerprint of the run they hold for, as plain values."""
        return {
            "fingerprint": self._fingerprint,
            "training": self.training.state_dict(),
            "evaluation": self.evaluation.state_dict(),
            "recomputes": self._checkpointing.everything,
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Load the sizes of another run, if it ran the same module in the same memory."""
        if state is None or state["fingerprint"] != self._fingerprint:
            return
        if state.get("recomputes"):
            self.recompute_everything("as memory ran out without it in an earlier run")
        self.training.load_state_dict(state["training"])
        self.evaluation.load_state_dict(state["evaluation"])

    def save(self) -> None:
        """Write the sizes to the file that `remember` names."""
        if self.writes_file:
            self._file.write(self.state_dict())
