"""Sampling completions: prompts once, one graph for each step, rows dropped as they end."""

from lightning_unified.models.grpo.rollout.sampler import DECODINGS, Completions, Sampler

__all__ = ["DECODINGS", "Completions", "Sampler"]
