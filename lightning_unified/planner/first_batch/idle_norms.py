"""Find out whether a step runs BatchNorm layers with statistics of the batch."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_unified.errors import UndoError
from lightning_unified.step.exactness.trials.results import copied
from lightning_unified.step.exactness.verdict import BatchNormsThatMix
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.undone_run import Undone
from lightning_unified.step.split import BatchShape

__all__ = ["finds_idle_norms"]


def finds_idle_norms(
    trainer: L.Trainer,
    policy: MemoryPolicy,
    batch: Any,
    shape: BatchShape | None,
    *,
    step: Callable[[Any], ClosureResult],
) -> bool:
    """Return whether only BatchNorm in train mode refuses a split, and the step runs none.

    A few rows run without gradients to see this, and are undone. Modes before the step do not tell: it may put layers into eval mode first,
    or not run them. The exactness check of the first split batch looks again.
    """
    if trainer.world_size > 1:  # the others run no rows now, and SyncBatchNorm would wait for them
        return False
    if shape is None or not policy.splits.may_have_idle_norms(shape.rows):
        return False
    norms = BatchNormsThatMix(trainer.lightning_module)
    rows = min(max(policy.sizes.unit, policy.sizes.least, 2), shape.rows)
    try:
        few = policy.batches.splitter("fit").split(batch, 0, rows, rows=shape.rows)
        with Undone(trainer, in_eval=lambda _: False), norms, torch.no_grad():
            step(copied(few))
    except UndoError:
        raise
    except Exception:  # a step that needs the whole batch, or gradients
        return False
    policy.splits.has_idle_norms = not norms.names
    return policy.splits.has_idle_norms
