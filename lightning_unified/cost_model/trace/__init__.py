"""The operations and allocations of one training step, at any size."""
