"""Random draws of a check: recorded over whole rows, replayed for micro-batches."""
