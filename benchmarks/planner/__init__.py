"""The planner: predicted against measured peaks, budgets, and other finders."""
