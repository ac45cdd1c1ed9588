"""The reaction to a GPU fault in a step: shorter command buffers."""

import logging

from lightning_unified.step.policy.memory_policy import MemoryPolicy
from lightning_unified.step.split import BatchShape
from lightning_unified.units import format_rows

__all__ = ["shorten_command_buffers"]

log = logging.getLogger("lightning_unified")


def shorten_command_buffers(policy: MemoryPolicy, shape: BatchShape | None, *, phase: str, found: str) -> None:
    """Halve the micro-batches of a batch that the GPU lost work of, and report the repetition.

    They are not halved below one unit. The size that failed is tried again after batches without trouble, like a size that ran out of
    memory. It returns at once if the batch turns out not to split exactly.

    Args:
        policy: The policy of the run.
        shape: The shape of the batch; None if it cannot be split.
        phase: `"optimizer step"` if weights were written and copied back; anything else is forward and backward.
        found: The lost work, in words.
    """
    policy.watch.release()
    sizes, sizing = policy.sizes, policy.sizing
    where = phase if phase == "optimizer step" else "forward or backward"
    what_next = "whole, with a wait for the device after each pass"
    if shape is not None:
        before = sizes.state_dict()
        if not policy.splits.refuses(shape.rows) and sizes.failed(shape, room_bytes=None):
            if policy.splits.verdict is None and sizing.before_overrun is None:
                sizing.before_overrun = before
            what_next = f"with micro-batches of {format_rows(sizes.micro_batch_size(shape))} and a wait for the device after each pass"
            sizing.changed_by = f"smaller: the GPU lost work in {where}"
    policy.recoveries += 1
    policy.events.append(f"GPU fault in {where}: {found}; repeated {what_next}")
    log.warning("%s", policy.events[-1])
    sizing.save()
