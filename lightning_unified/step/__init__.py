"""Layer 3: one training step, split into micro-batches, run forward and backward, undone and repeated when memory runs out."""
