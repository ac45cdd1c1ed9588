"""Evaluate a compressor against baselines that keep the same number of tokens."""
