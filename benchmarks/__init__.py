"""Benchmarks by subject, each with its record beside it; run from the repository's root: `python -m benchmarks.planner.accuracy`."""
