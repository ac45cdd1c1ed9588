"""Merge the state that micro-batches write: attributes, buffers and containers."""
