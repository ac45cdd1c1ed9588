"""What follows when memory runs out: errors recognised, state put back, sizes reduced, caches cleared."""
