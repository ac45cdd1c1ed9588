"""The planner: predicted peaks against measured ones, budgets kept, plans against sweeps and against other finders."""
