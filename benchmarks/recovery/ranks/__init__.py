"""Runs of several ranks that faults disturb."""
