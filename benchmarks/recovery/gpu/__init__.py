"""Faults of GPUs that raise nothing: detection and its cost, on simulated Macs."""
