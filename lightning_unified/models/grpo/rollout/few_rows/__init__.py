"""Decode steps of few rows, whose time is that of reading the weights."""
