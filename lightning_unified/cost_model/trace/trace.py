"""The trace of a training step: its operations, allocations and frees as a list of events.

A dry run executes the real step on fake tensors and records three kinds of events:

- `Work`: an operation, with its floating-point operations and the bytes it moves;
- `Take`: a storage begins to live, with its bytes and category;
- `Give`: a storage ends.

The sum of all `Take`s less all `Give`s up to an event is the number of live bytes there; the maximum is the peak. The same
list prices time (`rates/cost.py`) and, replayed through a model of the allocator, reserved memory (`memory/reserve.py`).

Traces at a few sizes determine every other size: `timeline.py` strips the sizes off, `basis.py` expresses each event's bytes
as monomials of rows and length, and `interpolation.py` evaluates them at the size requested.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

__all__ = [
    "CATEGORIES",
    "Category",
    "Collective",
    "Confidence",
    "Event",
    "Give",
    "Passes",
    "Phase",
    "Read",
    "Take",
    "Trace",
    "Work",
]

Category = Literal[
    "weights",
    "gathered weights",
    "gradients",
    "optimizer state",
    "buffers",
    "activations",
    "logits",
    "temporaries",
    "communication",
    "batch",
    "workspaces",
    "callbacks",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

Phase = Literal["setup", "batch", "forward", "backward", "optimizer step", "validation", "callbacks", "sampling"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Work:
    """One operation; it precedes the storages it takes.

    Attributes:
        op: Name of the operation, such as `"aten.mm.default"`.
        phase: Phase of the step.
        place: Name of the innermost module it ran in, as in `named_modules()`; empty outside all modules.
        flops: Floating-point operations; a multiplication and an addition count as two.
        moved: Bytes read and written.
        dtype: Dtype of its arithmetic, such as `"bfloat16"`; empty if it computes nothing.
    """

    op: str
    phase: Phase
    place: str = ""
    flops: int = 0
    moved: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Passes(Work):
    """Many operations in one event, priced by formula instead of traced one by one.

    Attributes:
        launches: Number of operations that the host launches.
        kernels: Number of kernels that the device runs.
    """

    launches: int = 1
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class Collective(Work):
    """An operation of all ranks together, such as an all-gather.

    Attributes:
        sent: Bytes that each rank sends over its link, by the ring algorithm.
        overlaps: Whether the device computes while the link transfers.
    """

    sent: int = 0
    overlaps: bool = True


@dataclass(frozen=True, slots=True)
class Take:
    """A storage begins to live.

    Attributes:
        storage: Number of the storage in the trace.
        bytes: Bytes requested, before any allocator rounds them.
        category: Purpose of the storage.
        since: For a storage that lives from the start in every step but the first: index of the operation that first created
            it, counted over the step's operations. None if unknown.
        stream: Number of the CUDA stream that allocates it: the allocator keeps freed blocks by stream. 0 is the default stream.
    """

    storage: int
    bytes: int
    category: Category
    since: int | None = None
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Give:
    """A storage ends."""

    storage: int


Event = Work | Take | Give


@dataclass(frozen=True, slots=True)
class Read:
    """A value that the step read from a tensor without values, and the value the dry run supplied.

    Attributes:
        op: The reading operation, such as `"aten._local_scalar_dense.default"`.
        place: As in `Work`.
        answer: The value supplied.
        shapes: Whether the value can decide a shape; then the trace may differ from the real step.
    """

    op: str
    place: str
    answer: str
    shapes: bool


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A training step, from before its batch arrives to after the optimizer has written.

    The first events, in phase `"setup"`, take the storages that live from the start: weights, gradients of the previous step
    and optimizer state. So the running sum of the events is the number of live bytes, and its maximum is the peak.

    Attributes:
        events: Events in the order of the step.
        rows: Rows of a micro-batch.
        num_micro_batches: Number of micro-batches in the step.
        length: Entries of a row, such as its tokens; None if rows have no length.
        backend: Backend whose kernels the trace shows: `"cpu"`, `"cuda"`, `"rocm"`, `"mps"`.
        reads: Values that the dry run made up.
        notes: Assumptions behind the figures, and effects the dry run cannot see.
        options: Memory options of the step, such as `{"recompute": "all", "precision": "bf16-mixed"}`.
        attends: Whether the step called torch's attention with gradients on a backend that is not the CPU.
        recomputed_blocks: Number of blocks that run again in the backward pass of a micro-batch.
        replayed: Names of modules whose training calls are replayed as CUDA graphs.
    """

    events: tuple[Event, ...]
    rows: int
    backend: str
    num_micro_batches: int = 1
    length: int | None = None
    reads: tuple[Read, ...] = ()
    notes: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    attends: bool = False
    recomputed_blocks: int = 0
    replayed: tuple[str, ...] = ()

    def is_replayed(self, work: Work) -> bool:
        """Return whether the operation is part of a CUDA graph."""
        if not self.replayed or work.phase not in ("forward", "backward"):
            return False
        return any(work.place == name or work.place.startswith(f"{name}.") for name in self.replayed)

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """Results that are computed from this trace once, such as replays of an allocator; no part of its value."""
        return {}

    @property
    def confidence(self) -> Confidence:
        """Confidence in the trace: high without made-up values, low if one of them can decide a shape."""
        if any(read.shapes for read in self.reads):
            return "low"
        return "medium" if self.reads else "high"
