"""Whole runs: time per step beside plain Lightning, on one device and on several ranks."""
