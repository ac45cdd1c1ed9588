"""Results of micro-batches, merged into those of the whole batch."""
