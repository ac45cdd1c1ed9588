"""Cross-entropy kernels for a chunk of logits: torch's operators, and Triton's on CUDA."""
