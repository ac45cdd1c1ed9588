"""Wordle data: example games and prompts as batches."""
