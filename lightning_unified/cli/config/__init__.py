"""The requested configuration: overrides checked, composed with Hydra, bound to signatures, or read from an earlier run."""
