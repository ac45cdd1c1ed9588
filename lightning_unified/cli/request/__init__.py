"""What was asked for: overrides checked, composed with Hydra, bound to the signatures they configure, or read from an earlier run."""
