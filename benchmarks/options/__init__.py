"""Memory options: which blocks to recompute, and what is kept."""
