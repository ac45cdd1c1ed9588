"""Sample completions: read each prompt once, decode all rows together, drop ended rows."""

from lightning_unified.models.grpo.rollout.sampler import DECODINGS, Sampler
from lightning_unified.models.grpo.rollout.sampling import Completions, CompletionSampler, SamplingOptions

__all__ = ["DECODINGS", "CompletionSampler", "Completions", "Sampler", "SamplingOptions"]
