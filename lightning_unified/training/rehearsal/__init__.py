"""A training step run without values: the real Trainer and the real module, shadows of them, on tensors that are fake."""

from lightning_unified.training.rehearsal.run import rehearse, rehearse_validation

__all__ = ["rehearse", "rehearse_validation"]
