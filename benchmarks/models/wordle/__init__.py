"""Wordle: a whole run, with its games and rewards."""
