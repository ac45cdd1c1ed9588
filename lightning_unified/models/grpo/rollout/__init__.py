"""Sample completions: read each prompt once, decode all rows together, drop ended rows."""

from lightning_unified.models.grpo.rollout.sampler import Sampler
from lightning_unified.models.grpo.rollout.sampling import Completions, CompletionSampler, SamplingOptions

__all__ = ["CompletionSampler", "Completions", "Sampler", "SamplingOptions"]
