"""Causal language models of transformers: weights, adapters, presets, and supervised training."""
