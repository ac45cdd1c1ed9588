"""Facts about a batch, its module and the progress of a run; a batch with new facts is checked before its update."""
