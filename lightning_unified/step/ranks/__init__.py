"""What several processes agree on, so that all run the same step or none does."""
