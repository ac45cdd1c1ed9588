"""Attention in chunks: time, memory and predicted peaks."""
