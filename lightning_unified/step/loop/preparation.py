"""The rule `prepare`, run once on each whole batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch

from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.recovery.snapshot import StepSnapshot

__all__ = ["prepared"]


def prepared(batch: Any, *, trainer: L.Trainer, policy: MemoryPolicy, snapshot: Callable[[Any], StepSnapshot]) -> Any:
    """Return the whole batch after the rule `prepare`; repeat the rule if memory runs out.

    Args:
        batch: The whole batch.
        trainer: The Trainer of the fit.
        policy: Holds the rules, and reacts when memory runs out.
        snapshot: Records the state before an attempt on a batch.
    """
    prepare = policy.batches.of("fit").prepare
    if prepare is None:
        return batch

    def call(batch: Any) -> Any:
        with torch.no_grad(), trainer.precision_plugin.train_step_context():
            return prepare(batch)

    if not policy.options.recover:
        return call(batch)
    failures = 0
    while True:
        before = snapshot(batch)
        result, reason = caught(partial(call, batch))
        if reason is None:
            return result
        failures += 1
        batch = before.undo()
        del before
        policy.out_of_memory(phase="prepare", reason=reason, shape=None, attempt=failures)
