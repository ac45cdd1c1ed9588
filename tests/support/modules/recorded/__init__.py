"""Networks whose calls are recorded as CUDA graphs, and their steps."""
