"""Limits of torch's allocators: environment variables, written before they are read and checked, and caps."""
