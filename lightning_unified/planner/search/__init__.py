"""The search for the fastest step that fits: traces, sizes, combinations of memory options.

`planner.py` predicts memory and time of a step at any size, and searches.
"""
