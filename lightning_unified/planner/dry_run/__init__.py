"""A training step run without values: the real Trainer and the real module, shadows of them, on tensors that are fake."""

from lightning_unified.planner.dry_run.run import Rehearsals, rehearse, rehearse_validation

__all__ = ["Rehearsals", "rehearse", "rehearse_validation"]
