"""The trace of a training step, and traces of other sizes interpolated from a few."""
