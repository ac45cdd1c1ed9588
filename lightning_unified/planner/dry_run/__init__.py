"""A training step run without values: the real Trainer and the real module, fake copies of them, on tensors that are fake."""

from lightning_unified.planner.dry_run.run import DryRuns, trace_step, trace_validation

__all__ = ["DryRuns", "trace_step", "trace_validation"]
