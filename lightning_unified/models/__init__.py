"""Models, each with its network, data, presets and evaluation."""

SHOWS_ITS_LINES = True
"""Reports name lines of this package like a user's own, when they say where memory was taken."""
