"""Sample completions: read each prompt once, decode all rows together, drop ended rows."""

from lightning_unified.models.grpo.rollout.sampler import DECODINGS, Completions, Sampler

__all__ = ["DECODINGS", "Completions", "Sampler"]
