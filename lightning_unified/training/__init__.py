"""Floor 3: the step. Split a batch, run it forward and backward, and recover when memory runs out."""
