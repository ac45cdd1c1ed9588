"""What micro-batches log, count, return and write, merged into the whole batch's."""
