"""Merge the results of micro-batches into the results of the whole batch."""
