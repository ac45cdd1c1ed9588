"""Bytes: of weights, gradients and optimizer state; the peak of a step; what an allocator reserves for it."""
