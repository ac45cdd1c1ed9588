"""Batches of GRPO: sampled completions, their rewards and advantages, kept for several steps."""
