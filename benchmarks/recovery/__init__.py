"""Recovery: faults and pressure during small runs, and the cost of snapshots."""
