"""What a search compares, and what it finds, as records."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lightning_unified.cost_model.trace.trace import Trace

__all__ = ["Candidate", "Choice", "Option", "Sizes", "what_would_fit"]


class Sizes(Protocol):
    """The step under one setting of the memory options, at any size, as `planning.traces.Lines` gives it."""

    def at(self, rows: int, *, parts: int = 1) -> Trace:
        """Return the trace of a step of `parts` micro-batches of `rows` rows, the batch of them all in it."""
        ...

    def peak_bytes(self, rows: int, *, parts: int = 1) -> int:
        """Return the most bytes that live at once in that step."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One setting of the memory options.

    Attributes:
        traces: The step under it. May make its traces when first asked: options that cannot win are never asked.
        recompute: What runs again in the backward pass, in words: `"none"`, `"6 of 12 blocks"`, `"all"`, `"all, attention kept"`.
        again: The share of the forward pass that runs again, from 0 to 1; of two options that differ in nothing else, the one
            with less is never slower.
        precision: Lightning's name.
        optimizer_kernel: `"fused"`, `"foreach"`, `"for-loop"`; None leaves the user's.
        loss_chunk: Rows of logits at once; None computes the loss as the module does.
        changes: How many of the user's own settings it changes; decides between options of equal time.
        least_seconds: Tells, by the number of micro-batches, what no step under it is faster than, as is known without its traces; a
            prediction below that is raised to it. More parts take no less. The option is then asked only for what can win. None asks
            for its best way to cut in any case, to tell it beside the others.
        way: Rows of each micro-batch, if it is asked in this way only; None asks in all. Such options come by what they take at least.
        no_faster_than: A step that it is taken to be no faster than at any size: predictions are raised to that one's.
    """

    traces: Sizes
    recompute: str = "none"
    again: float = 0.0
    precision: str = "32-true"
    optimizer_kernel: str | None = None
    loss_chunk: int | None = None
    changes: int = 0
    least_seconds: Callable[[int], float] | None = None
    no_faster_than: Sizes | None = None
    split: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One plan: an option with the way a batch is cut under it.

    Attributes:
        micro_batch_size: Rows of the largest micro-batch.
        parts: Micro-batches in a step.
        recompute, precision, optimizer_kernel, loss_chunk: As in `Option`.
        peak_bytes: The most that tensors take at once.
        reserved_bytes: What the allocator takes for them; this is held against the budget.
        seconds: What a step is predicted to last.
        fits: Whether `reserved_bytes` are within the budget.
    """

    micro_batch_size: int
    parts: int
    recompute: str
    precision: str
    optimizer_kernel: str | None
    loss_chunk: int | None
    peak_bytes: int
    reserved_bytes: int
    seconds: float
    fits: bool

    def describe(self) -> str:
        """Return the plan in words: `"2 parts of up to 32 rows, recomputed: 6 of 12 blocks, bf16-mixed"`."""
        rows = f"{self.micro_batch_size} row{'s' * (self.micro_batch_size != 1)}"
        upper = "up to " * (self.micro_batch_size != 1)  # parts that are not all even differ by one unit
        size = f"the whole batch of {rows} at once" if self.parts == 1 else f"{self.parts} parts of {upper}{rows}"
        recompute = "nothing recomputed" if self.recompute == "none" else f"recomputed: {self.recompute}"
        named = [size, recompute, self.precision]
        named += [f"{self.optimizer_kernel} optimizer"] if self.optimizer_kernel else []
        named += [f"the loss in chunks of {self.loss_chunk}"] if self.loss_chunk else []
        return ", ".join(named)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `plan.json`."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a search found.

    Attributes:
        best: The plan of least predicted time; None if none fits.
        alternatives: The other options, each with its best way to cut: first those that fit, fastest first, then those that do
            not even in the smallest parts, with what these need, least first.
        reason: Why, in words.
    """

    best: Candidate | None
    alternatives: tuple[Candidate, ...]
    reason: str


def what_would_fit(choice: Choice) -> list[tuple[str, int]]:
    """Return what the options need at least, in words and bytes, least first: the table under a refusal."""
    return [(plan.describe(), plan.reserved_bytes) for plan in choice.alternatives if not plan.fits]
