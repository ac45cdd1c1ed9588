"""Limits of torch's allocators (environment variables and caps), and builds of torch."""
