"""The compressor: memory, and quality beside baselines."""
