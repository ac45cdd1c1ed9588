"""Repeated blocks: compiled, and recomputed in the backward pass."""
