"""Records of the plan search: options, splits, timed candidates, and the choice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.units import format_rows

__all__ = ["Candidate", "Choice", "Option", "Sizes", "Taken", "describe_split", "even_splits", "what_would_fit"]


class Sizes(Protocol):
    """Traces of one step at any micro-batch size, under one setting of the memory options."""

    def at(self, micro_batch_size: int, *, num_micro_batches: int = 1) -> Trace:
        """Return the trace of a step of so many micro-batches of that size, whole batch included."""
        ...

    def peak_bytes(self, micro_batch_size: int, *, num_micro_batches: int = 1) -> int:
        """Return the peak of live bytes of that step."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One setting of the memory options, with the traces that price it.

    Attributes:
        traces: Traces of the step under this setting. They may be made lazily: the search never asks options that cannot win.
        recompute: Modules under activation checkpointing, in words: `"none"`, `"6 of 12 blocks"`, `"all"`, `"all, attention
            kept"`.
        again: Share of the forward pass that is recomputed, from 0 to 1. Of two options that differ in nothing else, the one
            with the smaller share is never slower.
        precision: Lightning's name of the precision.
        optimizer_kernel: `"fused"`, `"foreach"` or `"for-loop"`; None leaves the user's.
        loss_chunk: Rows of logits computed at once; None computes the loss as the module does.
        attention: `"chunked"` computes attention in chunks of queries; None leaves it to torch.
        changes: Number of the user's own settings that this option changes. Of two plans with equal time, fewer changes win.
        least_seconds: Function of the number of micro-batches that returns a lower bound of the step time, known without
            traces. The search raises predictions below the bound to it. The bound never falls with more micro-batches.
        split: Rows of each micro-batch, if only this split is searched. Options with a split come in the order of their lower
            bounds, and the search traces them only while they can win. None searches all splits, and lists the best one among
            the alternatives.
        always: Whether the search looks at it however much it has traced so far.
    """

    traces: Sizes
    recompute: str = "none"
    again: float = 0.0
    precision: str = "32-true"
    optimizer_kernel: str | None = None
    loss_chunk: int | None = None
    attention: str | None = None
    changes: int = 0
    least_seconds: Callable[[int], float] | None = None
    split: tuple[int, ...] | None = None
    always: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Bytes that a step takes.

    Attributes:
        peak_bytes: Peak as the device's counter shows it (`counted_peak`).
        reserved_bytes: Peak of bytes that the allocator reserves.
    """

    peak_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One plan: an option together with a split of the batch.

    Attributes:
        micro_batch_size: Rows of the largest micro-batch.
        num_micro_batches: Number of micro-batches in a step.
        recompute, precision, optimizer_kernel, loss_chunk, attention: As in `Option`.
        peak_bytes: Peak as the device's counter shows it.
        reserved_bytes: Peak of bytes that the allocator reserves; the search compares this figure with the budget.
        seconds: Predicted seconds of a step.
        fits: Whether `reserved_bytes` is within the budget.
        waiting_seconds: Predicted seconds of a step in which the GPU waits for the host.
    """

    micro_batch_size: int
    num_micro_batches: int
    recompute: str
    precision: str
    optimizer_kernel: str | None
    loss_chunk: int | None
    peak_bytes: int
    reserved_bytes: int
    seconds: float
    fits: bool
    attention: str | None = None
    waiting_seconds: float = 0.0

    def describe(self) -> str:
        """Return the plan in words.

        For example `"2 micro-batches of up to 32 rows, activation checkpointing: 6 of 12 blocks, bf16-mixed"`.
        """
        checkpointing = "no activation checkpointing"
        if self.recompute != "none":
            checkpointing = f"activation checkpointing: {self.recompute}"
        named = [describe_split(self.micro_batch_size, self.num_micro_batches), checkpointing, self.precision]
        named += [f"{self.optimizer_kernel} optimizer"] if self.optimizer_kernel else []
        named += [f"the loss in chunks of {self.loss_chunk}"] if self.loss_chunk else []
        named += [f"{self.attention} attention"] if self.attention else []
        return ", ".join(named)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Result of a search.

    Attributes:
        best: The fitting plan of least predicted time; None if none fits.
        alternatives: The other options, each with its best split. Plans that fit come first, fastest first. Plans that do not
            fit follow with their smallest micro-batches, least bytes first.
        reason: Why the search chose `best`, or why nothing fits.
    """

    best: Candidate | None
    alternatives: tuple[Candidate, ...]
    reason: str

    def beside(self, other: "Choice") -> "Choice":
        """Return this choice with the plans of another search among its alternatives."""
        known = {self.best, *self.alternatives}
        plans = (*self.alternatives, *(one for one in (other.best, *other.alternatives) if one and one not in known))
        fitting = sorted((one for one in plans if one.fits), key=lambda plan: plan.seconds)
        short = sorted((one for one in plans if not one.fits), key=lambda plan: plan.reserved_bytes)
        return replace(self, alternatives=(*fitting, *short))


def describe_split(micro_batch_size: int, num_micro_batches: int) -> str:
    """Return a split in words, such as `"2 micro-batches of up to 32 rows"`.

    A single micro-batch gives `"the whole batch of 64 rows at once"`.

    Micro-batches of unequal size differ by one unit.
    """
    rows = format_rows(micro_batch_size)
    if num_micro_batches == 1:
        return f"the whole batch of {rows} at once"
    return f"{num_micro_batches} micro-batches of {'up to ' * (micro_batch_size != 1)}{rows}"


def what_would_fit(choice: Choice) -> list[tuple[str, int]]:
    """Return each plan that did not fit with the bytes it needs, least first, for a refusal."""
    return list(dict.fromkeys((plan.describe(), plan.reserved_bytes) for plan in choice.alternatives if not plan.fits))


def even_splits(
    rows: int, *, unit: int = 1, least: int = 1, micro_batch_size: int | None = None
) -> list[tuple[int, ...]]:
    """Return every even split of a batch as rows of micro-batches, fewest micro-batches first.

    The step splits a batch into as few micro-batches as a limit on their rows allows, and as evenly as possible. Limits that
    give the same number of micro-batches give the same split. So there are at most about 2 * sqrt(rows / unit) splits.

    Args:
        rows: Number of rows of the whole batch.
        unit: Number of neighbouring rows that stay together. A batch whose rows are no multiple of `unit` runs whole.
        least: Least number of rows of a micro-batch.
        micro_batch_size: Largest micro-batch allowed, in rows. If every split exceeds it, the split with the smallest
            micro-batches is returned. None allows any.

    Raises:
        ValueError: If a number of rows is not positive.

    Example:
        >>> even_splits(10, micro_batch_size=4)
        [(4, 3, 3), (3, 3, 2, 2), (2, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1, 1, 1, 1, 1)]
    """
    limit = rows if micro_batch_size is None else micro_batch_size
    if min(rows, unit, least, limit) < 1:
        raise ValueError(
            f"rows={rows}, unit={unit}, least={least}, micro_batch_size={micro_batch_size}: give positive numbers of rows."
        )
    units = rows // unit
    most_micro_batches = 1 if rows % unit else max(rows // max(least, unit), 1)
    found: list[tuple[int, ...]] = [(rows,)]
    num_micro_batches = 1
    while (largest := -(-units // num_micro_batches)) > 1:
        num_micro_batches = -(-units // (largest - 1))
        if num_micro_batches > most_micro_batches:
            break
        each, more = divmod(units, num_micro_batches)
        found.append(tuple(unit * (each + (index < more)) for index in range(num_micro_batches)))
    return [split for split in found if split[0] <= limit] or found[-1:]
