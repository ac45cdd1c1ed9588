"""The requested configuration: overrides checked, composed, bound, or read from an earlier run."""
