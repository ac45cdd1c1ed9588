"""What the benchmarks of the planner have in common: modules, the selection of cells, a pool of fresh processes, truth, and tables."""
