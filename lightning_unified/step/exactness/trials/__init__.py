"""Trials: rows run whole and in micro-batches, on the device or on the CPU, and compared."""
