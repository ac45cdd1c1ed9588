"""Random draws of a check: recorded and replayed by row, or made equal for every row."""
