"""Group-relative policy optimization (GRPO) of language models with verifiable rewards."""

from lightning_unified.models.grpo.batches.buffer import RolloutBuffer
from lightning_unified.models.grpo.batches.sequences import outline
from lightning_unified.models.grpo.module import GRPO
from lightning_unified.models.grpo.objective import Objective
from lightning_unified.models.grpo.rollout import SamplingOptions
from lightning_unified.models.grpo.task import Task

__all__ = ["GRPO", "Objective", "RolloutBuffer", "SamplingOptions", "Task", "outline"]
