"""Measurements for docs/lab/claims.md."""
