"""Warnings and notes on split batches that a run writes once."""

import logging
from collections.abc import Callable, Iterable

from lightning_unified.units import MIB, format_bytes

__all__ = ["Notices"]

log = logging.getLogger("lightning_unified")

_MUCH = 64 * MIB  # judgement: bytes of copies that are worth a warning


def _given(name: str) -> str:
    """Return the argument of `MergeRules` for a value; outputs without a name have an empty path."""
    return "..." if name else 'outputs={"": ...}'


class Notices:
    """Writes each text to the log and to the run's events, the first time only."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._said: set[str] = set()

    def begin(self) -> None:
        """Begin a fit or an evaluation, in which every text may be written again."""
        self._said = set()

    def say(self, text: str, write: Callable[..., None] = log.warning) -> None:
        """Write `text` once.

        Args:
            text: A sentence; its first letter is made upper case in the log.
            write: `log.warning` or `log.info`.
        """
        if text not in self._said:
            self._said.add(text)
            self._events.append(text)
            write("%s", text[:1].upper() + text[1:])

    def say_unmergeable(self, names: Iterable[str], *, phase: str) -> None:
        """Warn once of each value that no rule merges.

        Args:
            names: The names of the values, as logged or returned.
            phase: `"training"`, `"validation"`, `"test"` or `"predict"`.
        """
        for name in names:
            named = f"{name!r}, logged, returned or updated by {phase}_step," if name else f"the output of {phase}_step"
            self.say(
                f"{named} is not the whole batch's where a batch is split: no rule merges the "
                f"micro-batches' values. Compute it once an epoch, or give a rule in MicroBatchRules(merge=MergeRules({_given(name)}))."
            )

    def say_few_compared(self, rows: int, *, phase: str) -> None:
        """Note once that checks of `phase` compare no more than `rows` rows of a batch."""
        self.say(
            f"checks of {phase}_step compare {rows} rows of a batch, and not all, as more are not known to fit: they do not see what the step does "
            "with more rows only, or with the rows of the batch before.",
            log.info,
        )

    def say_ambiguous(self, names: Iterable[str], *, phase: str) -> None:
        """Warn once of each logged value that several weighted means fit, with different results.

        Args:
            names: The names of the values, as logged.
            phase: `"validation"`, `"test"` or `"predict"`.
        """
        for name in sorted(names):
            self.say(
                f"{name!r}, logged by {phase}_step, may differ from the whole batch's where a batch is split: the checks, of a few rows, fit "
                "means of several weights (rows, loss terms, the logged batch_size). Give the weights in MicroBatchRules(loss_weight=...), or a "
                "rule in MicroBatchRules(merge=MergeRules(logs=...)), or larger micro-batches."
            )

    def say_drawn(self, names: Iterable[str], *, phase: str) -> None:
        """Warn once that random draws for each micro-batch change an evaluation's results.

        `names` are those of the values that the evaluation logs.
        """
        logged = ", ".join(repr(name) for name in sorted(names))
        self.say(
            f"random draws of {phase}_step are made for each micro-batch, not for the whole batch: its results"
            f"{f' and logs ({logged})' if logged else ''} differ as with another seed."
        )

    def say_per_micro_batch(self, happens: str, instead: str) -> None:
        """Warn once that something happens once a micro-batch and not once a batch.

        Args:
            happens: A clause, such as `"the hook on_before_backward runs"`.
            instead: A sentence on how to have it happen once a batch.
        """
        self.say(f"{happens} once for each micro-batch where a batch is split. {instead}")

    def say_sized(self, paths: Iterable[str]) -> None:
        """Warn once of each dict to which micro-batches add entries by their number of rows."""
        for path in sorted(paths):
            self.say(
                f"{path} gets entries for the rows of micro-batches where a batch is split, not for those of the batch. Use it as a cache only: "
                "its entries must depend on nothing but the number of rows."
            )

    def say_varying(self, paths: Iterable[str], *, phase: str) -> None:
        """Note once which state equal runs write differently."""
        for path in sorted(paths):
            self.say(
                f"{phase}_step writes {path}, which differs between equal runs, as a time does, or is of a kind that cannot be compared: where a "
                "batch is split, it is what micro-batches write, not the whole batch.",
                log.info,
            )

    def say_trimmed(self, *, phase: str) -> None:
        """Note once that micro-batches are trimmed."""
        self.say(
            f"micro-batches are trimmed to their longest rows, because {phase}_step goes by the lengths of its rows.",
            log.info,
        )

    def say_drawn_state(self, paths: Iterable[str], *, phase: str) -> None:
        """Note once which state random draws decide."""
        for path in sorted(paths):
            self.say(
                f"{phase}_step writes {path}, which random draws decide: where a batch is split, it is what the last micro-batch has drawn.",
                log.info,
            )

    def say_copied(self, count: int) -> None:
        """Warn once of `count` bytes of gradients that are copied in every step."""
        if count >= _MUCH:
            self.say(
                f"gradients of {format_bytes(count)} are of tensors that no optimizer of the Trainer has, and so they are copied in every step. "
                "If nothing reads them, freeze these tensors by requires_grad_(False): that saves gradients and copies."
            )

    def say_rewritten(self, names: Iterable[str]) -> None:
        """Warn once of each trained parameter that a failed step wrote before the optimizer."""
        for name in names:
            self.say(
                f"a step that ran out of memory had written {name}, a trained parameter, before the optimizer step. The repeated step writes it "
                "again; this is the same only if the second write changes nothing, as a normalization. Write it in on_train_batch_end instead."
            )

    def say_unsplit(self, why: str, *, option: str, asked: int | None) -> None:
        """Note once in the events why batches are not split; warn if the user asked for a size.

        Args:
            why: A sentence on the batches.
            option: `"micro_batch_size"` or `"evaluation_micro_batch_size"`.
            asked: The rows that the user gave for that option; None for `"auto"`.
        """
        if why not in self._events:
            self._events.append(why)
            if asked is not None:
                log.warning("%s=%s has no effect: %s", option, asked, why)
