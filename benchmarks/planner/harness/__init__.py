"""Cells of the planner's benchmarks: selection, processes, peaks, records and tables."""
