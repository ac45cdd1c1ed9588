"""A step of training as a list of what happened to memory: what each operation computed, took and gave back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

__all__ = ["CATEGORIES", "Category", "Confidence", "Event", "Give", "Phase", "Read", "Take", "Trace", "Work"]

Category = Literal[
    "weights",
    "gradients",
    "optimizer state",
    "buffers",
    "activations",
    "logits",
    "temporaries",
    "batch",
    "workspaces",
    "callbacks",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

Phase = Literal["setup", "batch", "forward", "backward", "optimizer step", "validation", "callbacks"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Work:
    """One operation, before what it takes.

    Attributes:
        op: Its name, such as `"aten.mm.default"`.
        phase: In what part of the step.
        place: The innermost module it ran in, by its name in the trained module; empty outside all of them.
        flops: Floating-point operations; a multiplication and an addition are two.
        moved: Bytes read and written.
        dtype: Of what it computes, such as `"bfloat16"`; empty where it computes nothing.
    """

    op: str
    phase: Phase
    place: str = ""
    flops: int = 0
    moved: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Take:
    """A storage that begins to live.

    Attributes:
        storage: Its number in the trace.
        bytes: What was asked for, before any allocator rounds it.
        category: What it is for.
        since: Of a storage that is there from the start in every step but the first: the operation that it first came with, in the order of
            the step's operations; None where that is not said.
    """

    storage: int
    bytes: int
    category: Category
    since: int | None = None


@dataclass(frozen=True, slots=True)
class Give:
    """A storage that ends."""

    storage: int


Event = Work | Take | Give


@dataclass(frozen=True, slots=True)
class Read:
    """A value that the step read from a tensor that has none, and how it was answered.

    Attributes:
        op: The operation that read, such as `"aten._local_scalar_dense.default"`.
        place: As in `Work`.
        answer: What it was told.
        shapes: Whether the value can decide the shape of something, so that the trace may be of another step than the real one.
    """

    op: str
    place: str
    answer: str
    shapes: bool


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A step of training, from before its batch is there to after its optimizer has written.

    The storages that live from the start (weights, gradients of the step before, optimizer state) are taken by the first events,
    in phase `"setup"`; so every sum over the events is what lives, and its maximum is the peak.

    Attributes:
        events: In the order in which they happened.
        rows: Of a micro-batch.
        parts: Micro-batches in the step.
        length: Entries of a row (tokens) where rows have a length; None elsewhere.
        backend: Whose kernels it is a trace of: `"cpu"`, `"cuda"`, `"rocm"`, `"mps"`.
        reads: Values that were made up on the way.
        notes: What a reader of the figures must know, in words: what was assumed, and what could not be seen.
        options: What the step ran with, such as `{"recompute": "all", "precision": "bf16-mixed"}`.
    """

    events: tuple[Event, ...]
    rows: int
    backend: str
    parts: int = 1
    length: int | None = None
    reads: tuple[Read, ...] = ()
    notes: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def confidence(self) -> Confidence:
        """How far to trust it: high if nothing was made up, low if something made up can decide a shape."""
        if any(read.shapes for read in self.reads):
            return "low"
        return "medium" if self.reads else "high"
