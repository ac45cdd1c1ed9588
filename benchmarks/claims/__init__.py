"""Measurements for docs/claims.md."""
