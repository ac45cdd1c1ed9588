"""Blocks recorded as CUDA graphs, with gradients that stay where a recording writes them."""
