"""Kernels of the cross-entropy of a chunk of logits: torch's operators, and Triton's on CUDA."""
