"""Whole runs: under a memory limit, measured, scaled, interrupted."""
