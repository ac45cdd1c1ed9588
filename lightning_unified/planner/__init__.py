"""The planner: from a module and a batch to a plan.

Dry runs (`dry_run/`, `fake/`) give the trace of a step at any size. `search/` predicts its memory and time, and searches for the
fastest step that fits. `predict.py` offers both to users; `first_batch/` plans a running fit.
"""
