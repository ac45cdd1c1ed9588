"""Modules and batches that tests train, grouped by what they show."""
