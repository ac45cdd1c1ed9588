"""Benchmarks by subject, each with its record beside it.

Run them from the repository's root: `python -m benchmarks.planner.accuracy`.
"""
