"""Modules that the planner's benchmarks train."""
