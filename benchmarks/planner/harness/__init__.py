"""Cells of the planner's benchmarks: their selection, fresh processes, measured peaks, records and tables."""
