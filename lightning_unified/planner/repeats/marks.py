"""Marks in a recording: where the calls of blocks and their backward passes begin."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_unified.planner.fake.storages import Storage

__all__ = ["Mark", "Span"]

Direction = Literal["forward", "backward"]
Span = tuple[Direction, int, int]  # direction, micro-batch, block


@dataclass(slots=True)
class Mark:
    """The begin of a block's call or of its backward pass; it ends at the next mark.

    Attributes:
        span: Which pass of which block in which micro-batch; None outside of blocks.
        skipped: Whether the block did not run.
        result: The storage of the block's output, or of its input's gradient; None if it is no new one.
        gradients: The storages of parameters' gradients that the backward pass allocates, by name in the block; in a step to learn from,
            in the order in which they began to live.
    """

    span: Span | None
    skipped: bool = False
    result: Storage | None = None
    gradients: dict[str, Storage] = field(default_factory=dict)
