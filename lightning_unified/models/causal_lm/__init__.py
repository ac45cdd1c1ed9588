"""Causal language models of transformers: weights, adapters, presets, supervised training."""
