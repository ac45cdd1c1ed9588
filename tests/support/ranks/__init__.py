"""Runs of several processes, and the modules that they train."""
