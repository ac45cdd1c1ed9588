"""Checkpoints of a run, with the additional state that a bit-exact resume needs."""
