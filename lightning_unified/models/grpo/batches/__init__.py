"""GRPO's batches: completions, rewards and advantages, kept for several steps."""
